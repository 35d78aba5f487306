"""Held-out evaluation, pinned to a version."""
