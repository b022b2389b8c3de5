"""Tiny pipelines that animate the person of an image."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

from diffusers import FlowMatchEulerDiscreteScheduler, WanAnimate2Transformer3DModel
from diffusers.models.transformers import transformer_wan_animate_2
from tiny import tokens
from tiny.images.modular import modular
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


@contextmanager
def uncompiled_masks() -> Iterator[None]:
    """Make masks of attention without a compiler, which takes 10 s for each size."""

    def mask(*args: Any, **kwargs: Any) -> Any:
        return create_block_mask(*args, **kwargs | {"_compile": False})

    create_block_mask = transformer_wan_animate_2.create_block_mask
    with mock.patch.object(transformer_wan_animate_2, "create_block_mask", mask):
        yield


PIPELINES: dict[str, Callable[[], Any]] = {
    "wan-animate-2": partial(animate_2, "WanAnimate2ModularPipeline"),
    "wan-animate-2-distilled": partial(animate_2, "WanAnimate2DistilledModularPipeline"),
}
