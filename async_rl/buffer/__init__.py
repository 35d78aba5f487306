"""The staleness-bounded replay buffer: a pure ledger, and the ZeroMQ server in front of it."""
