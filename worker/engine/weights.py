"""How much memory a model's weights will take, read from the heads of their files before anything is loaded."""

from __future__ import annotations

import json
import math
from pathlib import Path

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
