"""Keys of a model that save memory: weights in fewer bits or on the CPU, and decoding in tiles or image by image."""

from collections.abc import Mapping
from typing import Any

import torch

from shared.config.model_spec import ModelSpec
from shared.signature import DENOISERS

_TILED_ONLY = ("AutoencoderKLAllegro",)  # diffusers has not implemented another way


def save_memory(modules: Mapping[str, torch.nn.Module], spec: ModelSpec, dtype: torch.dtype) -> None:
    """Apply `layerwise_casting`, `vae_tiling` and `vae_slicing`; raises `ValueError` if a module cannot do it."""
    if spec.layerwise_casting is not None:
        for name in DENOISERS:
            if name in modules:
                _cast(modules[name], getattr(torch, spec.layerwise_casting), dtype)
    tiled = spec.vae_tiling or type(modules.get("vae")).__name__ in _TILED_ONLY
    for key, wanted in (("tiling", tiled), ("slicing", spec.vae_slicing)):
        if wanted:
            _enable(modules.get("vae"), key)


def offload_groups(pipeline: Any, device: torch.device) -> None:
    """Hold the weights on the CPU, and each block's on the device while it runs; those of VAEs stay on the device.

    The blocks are moved by hooks of `forward`, which `encode` and `decode` of a VAE do not call.
    """
    modules = {name: part for name, part in pipeline.components.items() if isinstance(part, torch.nn.Module)}
    vaes = [name for name, module in modules.items() if hasattr(module, "encode") or hasattr(module, "decode")]
    pipeline.enable_group_offload(
        device, offload_type="block_level", num_blocks_per_group=1, use_stream=True, exclude_modules=vaes
    )


def _cast(denoiser: torch.nn.Module, storage_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """Hold the weights of a denoiser in `storage_dtype`; each layer casts its own to `dtype` while it runs."""
    enable = getattr(denoiser, "enable_layerwise_casting", None)
    if enable is not None:
        enable(storage_dtype=storage_dtype, compute_dtype=dtype)
    if all(parameter.dtype is not storage_dtype for parameter in denoiser.parameters()):
        raise ValueError(f"layerwise_casting: {type(denoiser).__name__} has no layers for it; remove the key")


def _enable(vae: torch.nn.Module | None, key: str) -> None:
    name = "the model without a VAE" if vae is None else type(vae).__name__
    if not hasattr(vae, f"use_{key}"):  # diffusers has the methods in all VAEs, and raises there
        raise ValueError(f"vae_{key}: diffusers has none for {name}; remove the key")
    getattr(vae, f"enable_{key}")()
