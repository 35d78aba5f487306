"""Hostile input made by machine: valid messages and files, spoilt at places that a string of bytes chooses.

bytes (random, hypothesis, atheris) ─► Choices ─► spoil(valid input) ─► target ─► accepted, or the reason of its refusal
"""
