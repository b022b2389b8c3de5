"""The engine: fuses the forwards of many jobs' unmodified pipelines. Only this package imports diffusers."""

import os

from worker.engine.compile_cache import leave_unusable_cache

# Set before transformers is imported: it prints a warning for each optional dependency that is missing.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
unusable_compile_cache = leave_unusable_cache(os.environ)  # before torch is imported
