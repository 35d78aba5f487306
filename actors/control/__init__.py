"""Actors of a control run: vectorised environments, stepped with the newest policy, fragments out."""
