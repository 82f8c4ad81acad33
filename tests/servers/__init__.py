"""Real S3 servers on 127.0.0.1, as child processes that do not outlive the tests."""
