"""Tiny NucleusMoE-Image, with experts in its last two blocks; its processor needs torchvision."""

from __future__ import annotations

from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    NucleusMoEImagePipeline,
    NucleusMoEImageTransformer2DModel,
)
from tiny import components, tokens


def nucleus_image() -> NucleusMoEImagePipeline:
    """The pipeline reads the eighth layer of the text encoder from the end."""
    tokenizer = tokens.qwen()
    return NucleusMoEImagePipeline(
        transformer=NucleusMoEImageTransformer2DModel(
            in_channels=16,
            out_channels=4,
            num_layers=3,
            attention_head_dim=16,
            num_attention_heads=2,
            num_key_value_heads=1,
            joint_attention_dim=tokens.WIDTH,
            axes_dims_rope=(4, 6, 6),
            mlp_ratio=6.0,
            dense_moe_strategy="leave_first_block_dense",
            num_experts=4,
            moe_intermediate_dim=24,
            capacity_factors=2.0,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=AutoencoderKLQwenImage(
            base_dim=8,
            z_dim=4,
            dim_mult=[1, 1, 2, 2],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            latents_mean=[0.1] * 4,
            latents_std=[0.5] * 4,
        ),
        text_encoder=components.qwen3_vl(tokenizer, layers=8),
        processor=tokens.qwen3_vl(tokenizer),
    )


PIPELINES = {"nucleus-image": nucleus_image}
