"""The sides that a model in a folder can make: pipelines round others, without a word in the result."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

from shared.architectures.registry import PACKED, UPSCALERS
from shared.config.partial_denoising import pipeline_class
from shared.signature import denoisers_of

XL_SCALE = 8
"""Pixels of a side for each value of the latents' side, by Stable Diffusion XL's VAE."""


def size_step(folder: Path) -> int:
    """Return what the sides of images are multiples of; 1 if the files of the model do not say."""
    scale = vae_scale(str(folder))
    if scale is None:
        return 1
    packed = PACKED.intersection((denoisers_of(folder) or {}).values())
    return (scale << bool(packed)) * int(next(iter(upscale_factors(str(folder))), 1))


def upscale_factors(source: str) -> tuple[float, ...]:
    """Return how many times as long the sides of an image or a video get that the model in a folder upscales, the
    default first; none if it upscales none, or its files do not say."""
    return UPSCALERS.get(pipeline_class(source) or "", ())


def vae_scale(source: str) -> int | None:
    """Return the pixels of a side for each value of the latents' side; None if the files of the model do not say."""
    try:
        return _vae_scale(source)
    except (OSError, ValueError, TypeError, LookupError):
        return None  # loading the model reports the error


@lru_cache(maxsize=256)  # without what could not be read: a folder can be mounted later
def _vae_scale(source: str) -> int:
    vae = json.loads((Path(source) / "vae" / "config.json").read_text("utf-8"))
    if "spatio_temporal_scaling" in vae:  # LTX's, which gets patches of pixels
        return int(vae.get("spatial_compression_ratio") or vae["patch_size"] << sum(vae["spatio_temporal_scaling"]))
    if "encoder_block_out_channels" in vae and "block_out_channels" not in vae:  # Kandinsky's of super-resolution
        return 1 << len(vae["encoder_block_out_channels"][1:])
    # Wan's and Qwen-Image's VAE has a list for time with as many levels as there are for space.
    return 1 << len(vae["temperal_downsample"] if "temperal_downsample" in vae else vae["block_out_channels"][1:])
