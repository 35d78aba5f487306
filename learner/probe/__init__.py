"""The learner's half of the log-probability probe: compare, and say which side is wrong."""
