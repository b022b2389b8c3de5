"""Tiny Z-Image; its image-to-image and inpaint pipelines are built of the same modules."""

from __future__ import annotations

from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from tiny import components, tokens
from transformers import Qwen3Config, Qwen3Model


def z_image() -> ZImagePipeline:
    tokenizer = tokens.qwen()
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=components.flow_vae(),
        text_encoder=Qwen3Model(
            Qwen3Config(
                vocab_size=len(tokenizer),
                hidden_size=tokens.WIDTH,
                intermediate_size=37,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=8,
            )
        ),
        tokenizer=tokenizer,
        transformer=ZImageTransformer2DModel(
            in_channels=4,
            dim=32,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=tokens.WIDTH,
            axes_dims=[4, 6, 6],
            axes_lens=[1024, 64, 64],
        ),
    )


PIPELINES = {"z-image": z_image}
