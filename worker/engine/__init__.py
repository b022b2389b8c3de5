"""The engine: fuses the forwards of many jobs' unmodified pipelines. Only this package imports diffusers."""

import os

# Set before transformers is imported: it prints a warning for each optional dependency that is missing.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
