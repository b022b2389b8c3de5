"""The engine: fuses the forwards of many jobs' unmodified pipelines. Only this package imports diffusers.

`protocol` has the types of its boundary, without torch; `engine` and `remote` have the engine.
"""

import os

# Before transformers is imported: it prints a warning for each optional dependency that is missing.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
