"""Tiny control nets with random weights for the denoisers of tiny pipelines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    ControlNetModel,
    DiffusionPipeline,
    FluxControlNetModel,
    QwenImageControlNetModel,
    SD3ControlNetModel,
)
from tiny.weights import spread


def save(source: Path, folder: Path, seed: int) -> Path:
    """Save a control net for the pipeline in `source`."""
    loader: Any = DiffusionPipeline
    pipeline = loader.from_pretrained(source, local_files_only=True)
    with torch.random.fork_rng(devices=[]):
        net = _build(getattr(pipeline, "unet", None) or pipeline.transformer)
    spread(net, torch.Generator().manual_seed(seed))
    net.save_pretrained(folder, safe_serialization=True)
    return folder


def _build(denoiser: Any) -> Any:
    sizes = {name: denoiser.config.get(name) for name in ("attention_head_dim", "num_attention_heads")}
    match type(denoiser).__name__:
        case "UNet2DConditionModel":
            return ControlNetModel.from_unet(denoiser, conditioning_embedding_out_channels=(4, 8, 8, 8))
        case "SD3Transformer2DModel":
            return SD3ControlNetModel.from_transformer(denoiser, num_layers=1, num_extra_conditioning_channels=0)
        case "FluxTransformer2DModel":
            return FluxControlNetModel.from_transformer(denoiser, num_layers=1, num_single_layers=1, **sizes)
        case "QwenImageTransformer2DModel":
            return QwenImageControlNetModel.from_transformer(denoiser, num_layers=1, **sizes)
    raise ValueError(f"no control net for {type(denoiser).__name__}")
