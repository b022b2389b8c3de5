"""Tiny DreamLite and its mobile form: the denoiser gets the image to edit beside the noise; needs torchvision."""

from __future__ import annotations

from typing import Any

from diffusers import (
    AutoencoderTiny,
    DreamLiteMobilePipeline,
    DreamLitePipeline,
    DreamLiteUNetModel,
    FlowMatchEulerDiscreteScheduler,
)
from tiny import components, tokens
from tiny.images.qwen import TEMPLATES


def _parts() -> dict[str, Any]:
    tokenizer = tokens.qwen(TEMPLATES)
    return {
        "text_encoder": components.qwen3_vl(tokenizer),
        "tokenizer": tokenizer,
        "processor": tokens.qwen3_vl(tokenizer),
        "vae": AutoencoderTiny(
            encoder_block_out_channels=(8, 8, 8, 8),
            decoder_block_out_channels=(8, 8, 8, 8),
            num_encoder_blocks=(1, 1, 1, 1),
            num_decoder_blocks=(1, 1, 1, 1),
        ),
        "unet": DreamLiteUNetModel(
            block_out_channels=(16, 16, 32),
            layers_per_block=1,
            norm_num_groups=8,
            cross_attention_dim=24,
            attention_head_dim=2,
            encoder_hid_dim=tokens.WIDTH,
            encoder_hid_dim_type="text_proj_rms",
            use_linear_projection=True,
            addition_embed_type="time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=2 * 8,
            ff_mult=2,
        ),
        "scheduler": FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
    }


def dreamlite() -> DreamLitePipeline:
    return DreamLitePipeline(**_parts())


def dreamlite_mobile() -> DreamLiteMobilePipeline:
    return DreamLiteMobilePipeline(**_parts())


PIPELINES = {"dreamlite": dreamlite, "dreamlite-mobile": dreamlite_mobile}
