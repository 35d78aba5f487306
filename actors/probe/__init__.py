"""The engine's half of the log-probability probe."""
