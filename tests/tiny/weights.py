"""Seeded weights for tiny pipelines, scaled so that outputs depend on inputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import ModularPipeline

SEED = 7


def save(build: Callable[[], Any], folder: Path) -> Path:
    """Save the pipeline of `build` with the same weights every time; the global generator does not change."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        pipeline = build()
    generator = torch.Generator().manual_seed(SEED)
    for _, part in sorted(pipeline.components.items()):
        if isinstance(part, torch.nn.Module):
            spread(part, generator)
    modular = {"overwrite_modular_index": True} if isinstance(pipeline, ModularPipeline) else {}
    pipeline.save_pretrained(str(folder), safe_serialization=True, **modular)
    return folder


@torch.no_grad()
def spread(module: torch.nn.Module, generator: torch.Generator) -> None:
    """Draw every matrix at a scale that keeps the size of activations, and replace zeros by small weights.

    Layers that start at zero (gates, output projections) would hide errors before them.
    """
    for name, parameter in sorted(module.named_parameters()):
        if parameter.ndim >= 2:
            gain = 1.2 if parameter.ndim >= 4 else 1.1  # activations after a convolution lose more than half
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                gain = 2.5  # flat attention would not depend on the prompt
            if name.endswith("lm_head.weight"):
                gain = 8.0  # the codes must depend on the prompt
            if name.endswith(("conv_y.weight", "conv_b.weight")):
                gain = 0.05  # spatial norms multiply with latents, which are large here, and pixels would saturate
            std = gain * getattr(module, "tiny_gain", 1.0) * parameter[0].numel() ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
        elif name.endswith(("norm_q.weight", "norm_k.weight")):
            parameter.fill_(1.4)  # as above, for normalised queries and keys
        elif parameter.numel() and not bool(parameter.any()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
