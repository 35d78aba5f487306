"""Benchmarks of the learner, started by ``async-rl bench learner``."""
