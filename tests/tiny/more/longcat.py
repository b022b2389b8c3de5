"""Tiny LongCat-Image, whose text encoder rewrites prompts first; its processor needs torchvision."""

from __future__ import annotations

from diffusers import FlowMatchEulerDiscreteScheduler, LongCatImagePipeline, LongCatImageTransformer2DModel
from tiny import components, tokens


def longcat_image() -> LongCatImagePipeline:
    tokenizer = tokens.qwen()
    text_encoder = components.qwen_vl(len(tokenizer))
    text_encoder.generation_config.eos_token_id = list(range(0, len(tokenizer), 8))  # a few tokens, not 512
    return LongCatImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=components.flow_vae(16),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        text_processor=tokens.qwen_vl(tokenizer),
        transformer=LongCatImageTransformer2DModel(
            in_channels=64,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=tokens.WIDTH,
            axes_dims_rope=[4, 6, 6],
        ),
    )


PIPELINES = {"longcat-image": longcat_image}
