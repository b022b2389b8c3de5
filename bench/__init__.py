"""Benchmarks: ratios measured side by side in one run; recorded results are in `results/`."""

import os

# Set before transformers is imported: it logs its missing optional dependencies at every start.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
