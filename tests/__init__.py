"""stager's tests."""
