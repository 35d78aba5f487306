"""Environments of ours that step together: examples of the interfaces, and what presets and tests play."""
