"""Safetensors files: a header of JSON whose entries cover the rest of the file without gaps and overlaps.

The format is strict, so that what is read later is exactly what was checked. Needs no torch.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.inputs.formats import FormatFault

MAX_TENSORS = 20_000
FLOATS: Mapping[str, int] = {"F32": 4, "F16": 2, "BF16": 2}
"""Bytes of a value, by type."""

_INTEGERS = {"I32": 4, "I64": 8}  # of scalars only: some trainers write the alpha as one
_NAME = re.compile(r"[\w.<>-]{1,512}")
_MAX_DIMENSIONS = 5
_HEADER_STEP = 8  # as the library aligns its data

# High bytes of the floats of a type that are finite; NaN, infinity and, except for F16, 1.7e38 and more have others.
_FINITE = {
    "F16": bytes(byte for byte in range(256) if byte & 0x7C != 0x7C),
    "BF16": bytes(byte for byte in range(256) if byte & 0x7F != 0x7F),
    "F32": bytes(byte for byte in range(256) if byte & 0x7F != 0x7F),
}


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of the header, with its bytes [start, end) of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def header_length(head: bytes, size: int, most: int) -> int:
    """Return the length of the header of a file of `size` bytes that begins with the eight bytes `head`."""
    length = int.from_bytes(head, "little")
    if size < 10 or not 2 <= length <= min(most, size - 8):
        raise FormatFault(f"it is no safetensors file, or its header is above {most} bytes")
    return length


def read_header(header: bytes, data_bytes: int) -> Sequence[TensorEntry]:
    """Return the tensors of a file in the order of their bytes, or raise `FormatFault`."""
    decoded = _decode(header)
    notes = decoded.get("__metadata__", {})
    if not isinstance(notes, dict) or not all(isinstance(value, str) for value in notes.values()):
        raise FormatFault("its __metadata__ are not texts")
    entries = [(name, entry) for name, entry in decoded.items() if name != "__metadata__"]
    if not 1 <= len(entries) <= MAX_TENSORS:
        raise FormatFault(f"it has {len(entries)} tensors; 1 to {MAX_TENSORS} are allowed")
    tensors = sorted((_tensor(name, entry) for name, entry in entries), key=lambda one: (one.start, one.end))
    ends = [0, *(tensor.end for tensor in tensors)]
    for tensor, end in zip(tensors, ends, strict=False):
        if tensor.start != end:
            raise FormatFault(f"the bytes of {tensor.name} overlap others or leave a gap")
    if ends[-1] != data_bytes:
        described = f"{data_bytes} bytes of data, and its header describes {ends[-1]}"
        raise FormatFault(f"it has {described}: it is incomplete or has more")
    return tensors


def is_finite(data: bytes | memoryview, dtype: str) -> bool:
    """Return whether all values of a type are finite; whole numbers are."""
    if dtype not in _FINITE:
        return True
    return not bytes(data[FLOATS[dtype] - 1 :: FLOATS[dtype]]).translate(None, _FINITE[dtype])


def one_tensor(
    name: str, dtype: str, shape: Sequence[int], data: bytes, notes: Mapping[str, str] | None = None
) -> bytes:
    """Return the file of one tensor, with `notes` in its metadata."""
    entry = {"dtype": dtype, "shape": list(shape), "data_offsets": [0, len(data)]}
    header = json.dumps(({"__metadata__": dict(notes)} if notes else {}) | {name: entry}).encode()
    header += b" " * (-len(header) % _HEADER_STEP)
    return len(header).to_bytes(8, "little") + header + data


def _decode(header: bytes) -> dict[str, Any]:
    if header[:1] != b"{":
        raise FormatFault("its header is no JSON object")
    try:
        decoded = json.loads(header.decode(), object_pairs_hook=_unique)
    except RecursionError:
        raise FormatFault("its header is nested too deeply") from None
    except FormatFault:
        raise
    except ValueError as error:
        raise FormatFault(f"its header is not valid JSON: {str(error)[:80]}") from error
    if not isinstance(decoded, dict):
        raise FormatFault("its header is no JSON object")
    return decoded


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise FormatFault("its header has a name twice")
    return result


def _tensor(name: str, entry: Any) -> TensorEntry:
    if not _NAME.fullmatch(name) or ".." in name:
        raise FormatFault(f"{name[:80]!r} is no name of a weight")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise FormatFault(f"the entry of {name} does not have dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not _are_whole(shape, _MAX_DIMENSIONS) or not _are_whole(offsets, 2) or len(offsets) != 2 or 0 in shape:
        raise FormatFault(f"the shape or the offsets of {name} are invalid")
    item_bytes = FLOATS.get(dtype) if isinstance(dtype, str) else None
    if item_bytes is None and math.prod(shape) == 1 and isinstance(dtype, str):
        item_bytes = _INTEGERS.get(dtype)
    if item_bytes is None:
        raise FormatFault(f"{name} is {str(dtype)[:20]}; use {', '.join(FLOATS)}")
    if offsets[1] - offsets[0] != math.prod(shape) * item_bytes:
        raise FormatFault(f"the offsets of {name} do not fit its shape")
    return TensorEntry(name, dtype, tuple(shape), *offsets)


def _are_whole(values: Any, most: int) -> bool:
    """Return whether it is a list of at most `most` whole numbers from 0."""
    if not isinstance(values, list) or len(values) > most:
        return False
    return all(type(value) is int and 0 <= value < 1 << 40 for value in values)
