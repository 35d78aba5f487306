"""Engines turn requests into tokens and swap weights in flight; :mod:`actors.engines.base` has their interface."""
