"""Tiny pipelines that animate the person of an image."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    WanAnimate2Transformer3DModel,
    WanAnimatePipeline,
    WanAnimateTransformer3DModel,
)
from diffusers.models.transformers import transformer_wan_animate_2
from tiny import tokens
from tiny.images.modular import modular
from tiny.more import wan
from transformers import CLIPVisionConfig, CLIPVisionModel


def animate_2(class_name: str) -> Any:
    """The denoiser reads keys and values of the driving video; its image embedding has the width of CLIP's largest."""
    encoder = CLIPVisionConfig(
        hidden_size=1280,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=224,
        patch_size=112,
    )
    transformer = WanAnimate2Transformer3DModel(
        in_dim=12,
        dim=32,
        ffn_dim=48,
        freq_dim=32,
        text_dim=tokens.WIDTH,
        out_dim=4,
        num_heads=2,
        num_layers=2,
    )
    return modular(
        class_name,
        "videos.wan",
        "wan-2.1-t2v",
        transformer=transformer,
        image_encoder=CLIPVisionModel(encoder),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
    )


def animate() -> WanAnimatePipeline:
    transformer = WanAnimateTransformer3DModel(
        **wan.SIZES,
        in_channels=12,
        latent_channels=4,
        out_channels=4,
        image_dim=16,
        motion_encoder_channel_sizes={"4": 16, "8": 16, "16": 16},
        motion_encoder_size=16,
        motion_style_dim=8,
        motion_dim=4,
        motion_encoder_dim=16,
        face_encoder_hidden_dim=16,
        face_encoder_num_heads=2,
        inject_face_latents_blocks=2,
    )
    return WanAnimatePipeline(**wan.parts(), **wan.image_parts(), transformer=transformer)


@contextmanager
def uncompiled_masks() -> Iterator[None]:
    """Make masks of attention without a compiler, which takes 10 s for each size."""

    def mask(*args: Any, **kwargs: Any) -> Any:
        return create_block_mask(*args, **kwargs | {"_compile": False})

    create_block_mask = transformer_wan_animate_2.create_block_mask
    with mock.patch.object(transformer_wan_animate_2, "create_block_mask", mask):
        yield


PIPELINES: dict[str, Callable[[], Any]] = {
    "wan-animate": animate,
    "wan-animate-2": partial(animate_2, "WanAnimate2ModularPipeline"),
    "wan-animate-2-distilled": partial(animate_2, "WanAnimate2DistilledModularPipeline"),
}
