"""From a command of the user to processes that run and end: checks, commands, supervision, display.

session ─► preflight, overview ─► launcher (children, commands, interrupts) ─► progress
"""
