"""Benchmarks: ratios measured side by side in one run; recorded results are in `results/`."""

import os

# Before transformers is imported: it tells at every start which of its optional parts are missing.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
