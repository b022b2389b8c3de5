"""Tiny Ideogram 4, which ships as a modular pipeline only; without the head that rewrites prompts."""

from __future__ import annotations

from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Ideogram4ModularPipeline,
    Ideogram4Transformer2DModel,
)
from tiny import deep_qwen, tokens

TAPPED = 13  # layers of the text encoder that the denoiser reads; the last one is the 36th


def _transformer() -> Ideogram4Transformer2DModel:
    return Ideogram4Transformer2DModel(
        in_channels=16,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        intermediate_size=48,
        adaln_dim=16,
        llm_features_dim=TAPPED * deep_qwen.NARROW,
        mrope_section=(4, 2, 2),
    )


def ideogram_4() -> Ideogram4ModularPipeline:
    tokenizer = tokens.qwen()
    pipeline = Ideogram4ModularPipeline()
    pipeline.update_components(
        tokenizer=tokenizer,
        text_encoder=deep_qwen.headless(tokenizer, layers=36),
        transformer=_transformer(),
        unconditional_transformer=_transformer(),
        vae=AutoencoderKLFlux2(
            block_out_channels=(8, 8, 16, 16), layers_per_block=1, latent_channels=4, norm_num_groups=4, sample_size=64
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )
    return pipeline


PIPELINES = {"modular-ideogram-4": ideogram_4}
