"""Safetensors files without torch: LoRA weights for the demo, and files that are wrong."""

from __future__ import annotations

import json
import random
import struct
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

# Linear layers of the demo's denoiser: path, inputs, outputs.
DEMO_LAYERS = (
    ("down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q", 32, 32),
    ("down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_k", 64, 32),
    ("down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q", 80, 80),
)


def demo_lora(seed: int, *, rank: int = 4, strength: float = 0.5) -> bytes:
    """Return a LoRA of the demo's denoiser with random weights."""
    rng, tensors = random.Random(seed), {}
    for path, inputs, outputs in DEMO_LAYERS:
        down = [rng.gauss(0, inputs**-0.5) for _ in range(rank * inputs)]
        up = [strength * rng.gauss(0, rank**-0.5) for _ in range(outputs * rank)]
        tensors[f"unet.{path}.lora_A.weight"] = ([rank, inputs], down)
        tensors[f"unet.{path}.lora_B.weight"] = ([outputs, rank], up)
    return file_of(tensors)


def file_of(tensors: Mapping[str, tuple[Sequence[int], Sequence[float]]]) -> bytes:
    """Return a file of float32 tensors: names to shapes and values."""
    header: dict[str, Any] = {}
    data = bytearray()
    for name, (shape, values) in tensors.items():
        start = len(data)
        data += array("f", values).tobytes()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, len(data)]}
    return raw_file(header, bytes(data))


def raw_file(header: Any, data: bytes) -> bytes:
    """Return a file with any header: an object, or its bytes."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data
