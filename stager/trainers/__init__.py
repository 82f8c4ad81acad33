"""Optional helps for trainers, one module a framework; each imports its framework, and nothing imports them but you."""
