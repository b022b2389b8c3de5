"""Tiny Qwen-Image 2.1; its processor needs torchvision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.models import AutoencoderKLQwenImage21, QwenImage21Transformer2DModel
from diffusers.modular_pipelines.qwenimage21 import encoders
from diffusers.pipelines.qwenimage21 import QwenImage21Pipeline, pipeline_qwenimage21
from tiny import components, tokens

CHANNELS = 8


def qwen_image_2_1() -> QwenImage21Pipeline:
    tokenizer = tokens.qwen()
    return QwenImage21Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=AutoencoderKLQwenImage21(
            base_dim=8,
            decoder_base_dim=8,
            z_dim=CHANNELS,
            dim_mult=[1, 1, 2, 2, 2],
            num_res_blocks=1,
            latents_mean=[0.1] * CHANNELS,
            latents_std=[0.5] * CHANNELS,
        ),
        text_encoder=components.qwen3_vl(tokenizer),
        processor=tokens.qwen3_vl(tokenizer),
        transformer=QwenImage21Transformer2DModel(
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            context_in_dim=tokens.WIDTH,
            axes_dims_rope=(4, 6, 6),
        ),
    )


@contextmanager
def small_images() -> Iterator[None]:
    """Reduce the megapixel to which the pipeline scales inputs, to a 256th."""
    whole = pipeline_qwenimage21.calculate_dimensions
    for module in (pipeline_qwenimage21, encoders):
        module.calculate_dimensions = lambda area, ratio: whole(area // 256, ratio)
    try:
        yield
    finally:
        for module in (pipeline_qwenimage21, encoders):
            module.calculate_dimensions = whole


PIPELINES = {"qwen-image-2.1": qwen_image_2_1}
