"""Benchmarks that the command line offers: each figure stands beside a baseline measured in the same run."""
