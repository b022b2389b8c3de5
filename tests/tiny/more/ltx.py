"""Tiny LTX-Video, Mochi, and Cosmos Predict 2, which needs torchvision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from diffusers import (
    AutoencoderKLLTXVideo,
    AutoencoderKLMochi,
    AutoencoderKLWan,
    Cosmos2TextToImagePipeline,
    CosmosTransformer3DModel,
    FlowMatchEulerDiscreteScheduler,
    LTXConditionPipeline,
    LTXImageToVideoPipeline,
    LTXPipeline,
    LTXVideoTransformer3DModel,
    MochiPipeline,
    MochiTransformer3DModel,
)
from diffusers.pipelines.cosmos import pipeline_cosmos2_text2image
from tiny import components, tokens


def _text(max_length: int) -> dict[str, Any]:
    tokenizer = tokens.t5(max_length)
    return {"tokenizer": tokenizer, "text_encoder": components.t5_encoder(tokenizer)}


def ltx_vae(**more: Any) -> AutoencoderKLLTXVideo:
    return AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        spatio_temporal_scaling=(True, True, True, False),
        decoder_spatio_temporal_scaling=(True, True, True, False),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        patch_size=1,
        patch_size_t=1,
        **more,
    )


def _ltx_parts() -> dict[str, Any]:
    return {
        **_text(128),
        "scheduler": FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05),
        "vae": ltx_vae(),
        "transformer": LTXVideoTransformer3DModel(
            in_channels=8,
            out_channels=8,
            num_attention_heads=2,
            attention_head_dim=16,
            cross_attention_dim=32,
            num_layers=2,
            caption_channels=tokens.WIDTH,
        ),
    }


def ltx_video() -> LTXPipeline:
    return LTXPipeline(**_ltx_parts())


def ltx_video_from_image() -> LTXImageToVideoPipeline:
    return LTXImageToVideoPipeline(**_ltx_parts())


def ltx_video_condition() -> LTXConditionPipeline:
    """Of LTX-Video 0.9.5 and later, whose first frame is one of several possible conditions."""
    return LTXConditionPipeline(**_ltx_parts() | {"scheduler": FlowMatchEulerDiscreteScheduler()})


def mochi() -> MochiPipeline:
    return MochiPipeline(
        **_text(256),
        scheduler=FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
        vae=AutoencoderKLMochi(
            encoder_block_out_channels=(32, 32, 32, 32),
            decoder_block_out_channels=(32, 32, 32, 32),
            layers_per_block=(1, 1, 1, 1, 1),
        ),
        transformer=MochiTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=12,
            num_layers=2,
            pooled_projection_dim=16,
            text_embed_dim=tokens.WIDTH,
            time_embed_dim=16,
        ),
    )


class LenientChecker:
    """Stand-in for Cosmos' guardrail, a model of its own that must be installed."""

    def to(self, *_args: Any) -> LenientChecker:
        return self

    def check_text_safety(self, _text: str) -> bool:
        return True

    def check_video_safety(self, frames: Any) -> Any:
        return frames


@contextmanager
def without_guardrail() -> Iterator[None]:
    with mock.patch.object(pipeline_cosmos2_text2image, "CosmosSafetyChecker", LenientChecker):
        yield


def cosmos_2_image() -> Cosmos2TextToImagePipeline:
    with without_guardrail():
        pipeline = Cosmos2TextToImagePipeline(
            **_text(512),
            scheduler=FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True),
            vae=AutoencoderKLWan(
                base_dim=8, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
            ),
            transformer=CosmosTransformer3DModel(
                num_attention_heads=2,
                attention_head_dim=16,
                num_layers=2,
                mlp_ratio=2.0,
                text_embed_dim=tokens.WIDTH,
                adaln_lora_dim=4,
                max_size=(4, 32, 32),
            ),
        )
    pipeline.register_modules(safety_checker=None)
    return pipeline


PIPELINES = {
    "ltx-video": ltx_video,
    "ltx-video-i2v": ltx_video_from_image,
    "ltx-video-condition": ltx_video_condition,
    "mochi": mochi,
    "cosmos-2-t2i": cosmos_2_image,
}
