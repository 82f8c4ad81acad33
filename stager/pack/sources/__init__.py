"""Where samples come from, one kind of source a file."""
