"""The node cache: layout, shards, eviction, adoption and quarantine at start."""
