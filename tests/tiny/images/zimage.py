"""Tiny Z-Image; its image-to-image and inpaint pipelines are built of the same modules."""

from __future__ import annotations

from typing import Any

from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    ZImageOmniPipeline,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from tiny import components, tokens
from transformers import (
    Qwen3Config,
    Qwen3Model,
    Siglip2ImageProcessorPil,
    Siglip2VisionConfig,
    Siglip2VisionModel,
)


def _transformer(**more: Any) -> ZImageTransformer2DModel:
    return ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=tokens.WIDTH,
        axes_dims=[4, 6, 6],
        axes_lens=[1024, 64, 64],
        **more,
    )


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
        transformer=_transformer(),
    )


def z_image_omni() -> ZImageOmniPipeline:
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return ZImageOmniPipeline(
        **z_image().components | {"transformer": _transformer(siglip_feat_dim=vision["hidden_size"])},
        siglip=Siglip2VisionModel(Siglip2VisionConfig(patch_size=16, num_patches=16, **vision)),
        siglip_processor=Siglip2ImageProcessorPil(max_num_patches=16),
    )


PIPELINES = {"z-image": z_image, "z-image-omni": z_image_omni}
