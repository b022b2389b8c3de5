"""Tiny EasyAnimate."""

from __future__ import annotations

from diffusers import (
    AutoencoderKLMagvit,
    EasyAnimatePipeline,
    EasyAnimateTransformer3DModel,
    FlowMatchEulerDiscreteScheduler,
)
from tiny import components, tokens


def easyanimate() -> EasyAnimatePipeline:
    tokenizer = tokens.qwen()
    return EasyAnimatePipeline(
        vae=AutoencoderKLMagvit(
            latent_channels=4,
            block_out_channels=(8, 8, 8, 8),
            down_block_types=("SpatialDownBlock3D", *("SpatialTemporalDownBlock3D",) * 3),
            up_block_types=("SpatialUpBlock3D", *("SpatialTemporalUpBlock3D",) * 3),
            layers_per_block=1,
            norm_num_groups=2,
        ),
        text_encoder=components.qwen_vl(len(tokenizer)),
        tokenizer=tokenizer,
        transformer=EasyAnimateTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=4,
            out_channels=4,
            patch_size=2,
            num_layers=2,
            mmdit_layers=1,
            time_embed_dim=16,
            text_embed_dim=tokens.WIDTH,
            sample_width=8,
            sample_height=8,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )


PIPELINES = {"easyanimate": easyanimate}
