"""Benchmarks of the queue and its event streams at sizes that no test reaches."""
