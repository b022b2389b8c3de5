"""Tiny FLUX.3 and its distilled form, which ship as modular pipelines only; without the model that rewrites prompts.

The processor needs torchvision.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from diffusers import (
    AutoencoderKLFlux2,
    Flux3DistilledModularPipeline,
    Flux3ModularPipeline,
    Flux3Transformer2DModel,
)
from tiny import deep_qwen, tokens

TAPPED = 8  # layers of the text encoder that the denoiser reads; the last one is the 32nd


def _pipeline(make: Any, flow_map: bool) -> Any:
    tokenizer = tokens.qwen(tokens.PROMPT_WORDS)
    pipeline = make()
    pipeline.update_components(
        tokenizer=tokens.qwen3_vl(tokenizer),
        text_encoder=deep_qwen.for_generation(tokenizer, layers=33),
        vae=AutoencoderKLFlux2(
            block_out_channels=(8, 8, 16, 16), layers_per_block=1, latent_channels=4, norm_num_groups=4, sample_size=64
        ),
        transformer=Flux3Transformer2DModel(
            in_channels=16,
            cond_in_channels=16,
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=TAPPED * deep_qwen.NARROW,
            timestep_channels=32,
            axes_dims_rope=(4, 4, 4, 4),
            flow_map=flow_map,
        ),
    )
    return pipeline


PIPELINES = {
    "flux-3": partial(_pipeline, Flux3ModularPipeline, flow_map=False),
    "flux-3-distilled": partial(_pipeline, Flux3DistilledModularPipeline, flow_map=True),
}
