"""The sides that a model in a folder can make: pipelines round others, without a word in the result."""

from __future__ import annotations

import json
from pathlib import Path

from shared.signature import denoisers_of

PACKED = frozenset(
    {
        "BriaFibo2Transformer2DModel",
        "BriaFiboTransformer2DModel",
        "BriaTransformer2DModel",
        "ChromaTransformer2DModel",
        "Flux2Transformer2DModel",
        "FluxTransformer2DModel",
        "HiDreamImageTransformer2DModel",
        "Ideogram4Transformer2DModel",
        "Krea2Transformer2DModel",
        "LongCatImageTransformer2DModel",
        "Lumina2Transformer2DModel",
        "NucleusMoEImageTransformer2DModel",
        "OmniGenTransformer2DModel",
        "OvisImageTransformer2DModel",
        "QwenImageTransformer2DModel",
        "ZImageTransformer2DModel",
    }
)
"""Denoisers that get the latents in patches of 2 x 2."""


def size_step(folder: Path) -> int:
    """Return what the sides of images are multiples of; 1 if the files of the model do not say."""
    try:
        vae = json.loads((folder / "vae" / "config.json").read_text("utf-8"))
        # Wan's and Qwen-Image's VAE has a list for time with as many levels as there are for space.
        levels = len(vae["temperal_downsample"] if "temperal_downsample" in vae else vae["block_out_channels"][1:])
    except (OSError, ValueError, TypeError, LookupError):
        return 1  # loading the model reports the error
    packed = PACKED.intersection((denoisers_of(folder) or {}).values())
    return 1 << (levels + bool(packed))
