"""Builds the tiny models that reinforcement learning starts from."""
