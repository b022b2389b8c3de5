"""Latents of an image: a safetensors file of one tensor `latents`, [1, channels, height, width].

They stand for an image of a multiple of these sides, which depends on the model.
"""

import re
from collections.abc import Mapping

from shared.inputs.formats import FormatFault, StrippedImage
from shared.inputs.formats.safetensors import header_length, is_finite, one_tensor, read_header

NAME = "latents"
CHANNELS = 4
"""Of Stable Diffusion XL."""

MAX_SIDE = 1024
"""Those of the largest image of a models file, 8192 pixels, at the VAE's eighth."""

MAX_HEADER_BYTES = 256 * 1024  # the notes of `embed_parameters` have the prompts

_MAGIC = re.compile(rb"[\s\S]{3}\0{5}\{")


def is_file(data: bytes) -> bool:
    """Return whether data begin like a safetensors file."""
    return _MAGIC.match(data) is not None


def strip(data: bytes) -> StrippedImage:
    """Return the file without its notes, and the sides of the latents; raises `FormatFault`."""
    end = 8 + header_length(data[:8], len(data), MAX_HEADER_BYTES)
    tensors = read_header(data[8:end], len(data) - end)
    tensor = tensors[0]
    if len(tensors) > 1 or tensor.name != NAME:
        raise FormatFault(f"it must have one tensor, {NAME}, not {', '.join(one.name for one in tensors)[:80]}")
    shape = tensor.shape
    if len(shape) != 4 or shape[:2] != (1, CHANNELS) or max(shape) > MAX_SIDE:
        sides = f"height and width up to {MAX_SIDE}"
        raise FormatFault(f"its shape must be [1, {CHANNELS}, height, width], with {sides}, not {list(shape)}")
    values = data[end:]
    if not is_finite(values, tensor.dtype):
        raise FormatFault("it has values that are not finite")
    return StrippedImage(shape[3], shape[2], 1, file_of(tensor.dtype, shape, values))


def file_of(dtype: str, shape: tuple[int, ...], values: bytes, notes: Mapping[str, str] | None = None) -> bytes:
    """Return the file of latents, with `notes` in its metadata."""
    return one_tensor(NAME, dtype, shape, values, notes)
