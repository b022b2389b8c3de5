"""Tiny JoyImage, which edits images; its processor needs torchvision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from diffusers import FlowMatchEulerDiscreteScheduler, JoyImageEditPipeline, JoyImageEditTransformer3DModel
from diffusers.pipelines.joyimage import image_processor
from tiny import components, tokens
from tiny.images.qwen import TEMPLATES
from tiny.more import wan


def joyimage_edit() -> JoyImageEditPipeline:
    tokenizer = tokens.qwen(TEMPLATES)
    return JoyImageEditPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.5),
        vae=wan.vae(),
        text_encoder=components.qwen3_vl(tokenizer),
        tokenizer=tokenizer,
        transformer=JoyImageEditTransformer3DModel(
            in_channels=4,
            hidden_size=32,
            num_attention_heads=2,
            text_dim=tokens.WIDTH,
            mlp_width_ratio=2.0,
            num_layers=1,
            rope_dim_list=[4, 6, 6],
        ),
        processor=tokens.qwen3_vl(tokenizer),
    )


@contextmanager
def small_images() -> Iterator[None]:
    """Replace the list of sizes from which JoyImage chooses, about a megapixel each, by a small one."""
    with mock.patch.dict(image_processor.BUCKETS, {1024: [(64, 64)]}):
        yield


PIPELINES = {"joyimage-edit": joyimage_edit}
