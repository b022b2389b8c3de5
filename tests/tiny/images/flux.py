"""Tiny FLUX.1 pipelines for edit, fill and control; other tasks are built of the modules of the edit pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    FluxControlPipeline,
    FluxFillPipeline,
    FluxKontextPipeline,
    FluxTransformer2DModel,
)
from diffusers.pipelines.flux import pipeline_flux_kontext
from tiny import components, tokens
from transformers import CLIPTextModel


def _parts(in_channels: int) -> dict[str, Any]:
    first, second = tokens.clip(), tokens.t5(64)
    return {
        "scheduler": FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        "vae": components.flow_vae(),
        "text_encoder": CLIPTextModel(components.clip_config(first)),
        "tokenizer": first,
        "text_encoder_2": components.t5_encoder(second),
        "tokenizer_2": second,
        "transformer": FluxTransformer2DModel(
            patch_size=1,
            in_channels=in_channels,
            out_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=tokens.WIDTH,
            pooled_projection_dim=tokens.WIDTH,
            axes_dims_rope=(4, 4, 8),
            guidance_embeds=True,
        ),
    }


def flux_kontext() -> FluxKontextPipeline:
    return FluxKontextPipeline(**_parts(16))


def flux_fill() -> FluxFillPipeline:
    """The denoiser gets noise, the masked image and the mask: 16 + 16 + 4 * 64 channels."""
    return FluxFillPipeline(**_parts(288))


def flux_control() -> FluxControlPipeline:
    """The denoiser gets noise and the image of structure."""
    return FluxControlPipeline(**_parts(32))


@contextmanager
def small_images() -> Iterator[None]:
    """Replace the list of megapixel sizes to which Kontext scales inputs by small ones."""
    whole = pipeline_flux_kontext.PREFERRED_KONTEXT_RESOLUTIONS
    pipeline_flux_kontext.PREFERRED_KONTEXT_RESOLUTIONS = [(64, 64), (48, 96), (96, 48)]
    try:
        yield
    finally:
        pipeline_flux_kontext.PREFERRED_KONTEXT_RESOLUTIONS = whole


PIPELINES = {"flux-kontext": flux_kontext, "flux-fill": flux_fill, "flux-control": flux_control}
