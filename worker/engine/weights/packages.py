"""Optional packages that diffusers, transformers and peft import where they are installed, and what needs them."""

import json
from collections.abc import Iterable
from pathlib import Path

from shared.config.model_spec import ModelSpec

QUANTIZATION = ("bitsandbytes", "gguf", "torchao")
NEVER_USED = ("boto3",)  # accelerate imports it; the worker's other process has the storage


def unused_packages(specs: Iterable[ModelSpec]) -> tuple[str, ...]:
    """Return the packages that the engine of these models does not use.

    torchao takes a tenth of the engine's imports, logs warnings, and brings parts of torch.
    """
    return NEVER_USED if any(_may_be_quantized(spec) for spec in specs) else (*NEVER_USED, *QUANTIZATION)


def _may_be_quantized(spec: ModelSpec) -> bool:
    """Return whether a model has quantized weights, or could: those of a hub are not known before they are there."""
    sources = [spec.source, *(control.source for control in spec.control if control.source)]
    sources += [] if spec.refiner is None else [spec.refiner.source]
    return spec.quantization is not None or not all(_is_plain(Path(source)) for source in sources)


def _is_plain(folder: Path) -> bool:
    return folder.is_dir() and not any(_names_quantization(file) for file in folder.rglob("config.json"))


def _names_quantization(config: Path) -> bool:
    try:
        return "quantization_config" in json.loads(config.read_bytes())
    except (OSError, ValueError):
        return True  # the load reports what is wrong with it
