"""The stager command line, one file a command."""
