"""What is known of each provider, as data."""
