"""Object stores: the protocol, its implementations and its decorators."""
