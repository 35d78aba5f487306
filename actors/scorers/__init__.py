"""Processes that add one stage, reward or reference, to groups that they lease from the buffer."""
