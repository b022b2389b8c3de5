"""The engine: fuses the forwards of many jobs' unmodified pipelines. Only this package imports diffusers."""

import logging
import os

from worker.engine.compile_cache import leave_unusable_cache

# Set before transformers is imported: it prints a warning for each optional dependency that is missing.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
# Both import torchao, if it is installed, in every process. What it warns of, such as kernels for other GPUs and names
# that are deprecated, concerns none of the formats of `quantization`.
os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
unusable_compile_cache = leave_unusable_cache(os.environ)  # before torch is imported
