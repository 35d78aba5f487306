"""Functions of the user, run in child processes that can be killed."""
