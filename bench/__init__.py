"""Benchmarks: ratios measured side by side in one run; recorded results are in `results/`."""
