"""How much memory a model's weights will take, read from the heads of their files, and what there is for them."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import torch

from shared.config.models_file import ModelSpec
from shared.errors import ModelUnavailable

_FLOATING = ("F64", "F32", "F16", "BF16")  # as safetensors names them; loaded as the model's own dtype
_LONGEST_HEAD = 100 * 1024 * 1024


def folder_bytes(folder: Path, variant: str | None, itemsize: int) -> int:
    """Return the bytes of one component's weights in memory; `itemsize` is that of the dtype they are loaded as."""
    files = sorted(folder.glob("*.safetensors"))
    of_variant = [file for file in files if variant is not None and f".{variant}" in file.name]
    plain = [file for file in files if "." not in file.name.removesuffix(".safetensors")]
    return sum(file_bytes(file, itemsize) for file in of_variant or plain or files)


def file_bytes(file: Path, itemsize: int) -> int:
    """Return the bytes of a file's tensors in memory; the file's own size where its head cannot be read."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            head = json.loads(opened.read(min(length, _LONGEST_HEAD)))
        tensors = [entry for name, entry in head.items() if name != "__metadata__"]
        return sum(_tensor_bytes(entry["dtype"], entry["shape"], entry["data_offsets"], itemsize) for entry in tensors)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return file.stat().st_size


def _tensor_bytes(dtype: str, shape: list[int], offsets: list[int], itemsize: int) -> int:
    return math.prod(shape) * itemsize if dtype in _FLOATING else offsets[1] - offsets[0]


def default_budget(device: torch.device) -> int:
    """Return 0.7 of the device's memory: the rest is for activations."""
    return int(0.7 * device_bytes(device))


def device_bytes(device: torch.device) -> int:
    """Return how much memory a device has."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def too_large(spec: ModelSpec, nbytes: int, room: int) -> ModelUnavailable | None:
    """Return the error of a model whose weights can never fit into `room` bytes, None if they may.

    One that is offloaded in groups is never on the device as a whole.
    """
    if nbytes <= room or spec.offload == "group":
        return None
    return ModelUnavailable(
        f"model {spec.id!r} does not fit: its weights take {nbytes / 2**30:.3g} GiB as {spec.dtype} and there are "
        f'{room / 2**30:.3g}; a smaller dtype, offload = "group" or a larger FUSEQUEUE_GPU_MEMORY_BYTES may help'
    )
