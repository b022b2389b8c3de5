"""Calls of tiny denoisers and text encoders with random rows, for tests of adapters."""

from __future__ import annotations

from typing import Any

import torch


def module_output(component: str, module: torch.nn.Module, rows: int = 2) -> Any:
    """Return the output of a module for random rows, always the same ones."""
    rng = torch.Generator().manual_seed(9)
    if component.startswith("text_encoder"):
        return module(input_ids=torch.arange(10 * rows).reshape(rows, 10)).last_hidden_state
    kind, config = type(module).__name__, getattr(module, "config", None)
    if kind.startswith("Flux"):
        return _flux_output(module, config, rows, rng)
    video = component == "transformer"
    latents = torch.randn((rows, 4, 1, 8, 8) if video else (rows, 4, 8, 8), generator=rng)
    text = torch.randn(rows, 6, 32 if video else config.cross_attention_dim, generator=rng)
    times = torch.linspace(7.0, 300.0, rows)
    more: dict[str, Any] = {}
    if getattr(config, "addition_embed_type", None) == "text_time":
        pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        more["added_cond_kwargs"] = {
            "text_embeds": torch.randn(rows, pooled, generator=rng),
            "time_ids": torch.randn(rows, 6, generator=rng),
        }
    return module(latents, times, text, return_dict=False, **more)[0]


def _flux_output(module: torch.nn.Module, config: Any, rows: int, rng: torch.Generator) -> Any:
    arguments: dict[str, Any] = {
        "hidden_states": torch.randn(rows, 4, config.in_channels, generator=rng),
        "encoder_hidden_states": torch.randn(rows, 6, config.joint_attention_dim, generator=rng),
        "timestep": torch.linspace(0.2, 0.7, rows),
        "img_ids": torch.zeros(4, len(config.axes_dims_rope)),
        "txt_ids": torch.zeros(6, len(config.axes_dims_rope)),
        "guidance": torch.ones(rows),
    }
    if hasattr(config, "pooled_projection_dim"):
        arguments["pooled_projections"] = torch.randn(rows, config.pooled_projection_dim, generator=rng)
    return module(return_dict=False, **arguments)[0]
