"""Vectorised environments behind one interface, see base.py; made by factory.py."""
