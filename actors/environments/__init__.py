"""Multi-turn environments: the protocol, those that ship, and the child processes that play them."""
