"""Tiny relatives of Wan: VACE, SkyReels-V2, SANA-Video, ChronoEdit and AnyFlow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from diffusers import (
    AutoencoderKLWan,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    SanaImageToVideoPipeline,
    SanaVideoPipeline,
    SanaVideoTransformer3DModel,
    SkyReelsV2DiffusionForcingImageToVideoPipeline,
    SkyReelsV2DiffusionForcingPipeline,
    SkyReelsV2ImageToVideoPipeline,
    SkyReelsV2Pipeline,
    SkyReelsV2Transformer3DModel,
    UniPCMultistepScheduler,
    WanVACEPipeline,
    WanVACETransformer3DModel,
)
from diffusers.pipelines.sana_video import pipeline_sana_video, pipeline_sana_video_i2v
from tiny import components, tokens
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    UMT5Config,
    UMT5EncoderModel,
)

SIZES: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "text_dim": tokens.WIDTH,
    "freq_dim": 32,
    "ffn_dim": 48,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}


def vae() -> AutoencoderKLWan:
    return AutoencoderKLWan(
        base_dim=8,
        dim_mult=[1, 2, 2, 2],
        latents_mean=[0.1, -0.1, 0.2, 0.0],
        latents_std=[0.5, 0.6, 0.4, 0.7],
        z_dim=4,
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
    )


def parts() -> dict[str, Any]:
    tokenizer = tokens.t5(512)
    return {
        "tokenizer": tokenizer,
        "text_encoder": UMT5EncoderModel(UMT5Config(**components.t5_sizes(len(tokenizer)))),
        "vae": vae(),
        "scheduler": UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
    }


def vace() -> WanVACEPipeline:
    transformer = WanVACETransformer3DModel(
        in_channels=4, out_channels=4, vace_layers=[0], vace_in_channels=2 * 4 + 64, **SIZES
    )
    return WanVACEPipeline(**parts(), transformer=transformer)


def skyreels() -> SkyReelsV2Pipeline:
    transformer = SkyReelsV2Transformer3DModel(in_channels=4, out_channels=4, **SIZES)
    return SkyReelsV2Pipeline(**parts(), transformer=transformer)


def image_parts() -> dict[str, Any]:
    vision = {"hidden_size": 16, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 2}
    return {
        "image_encoder": CLIPVisionModelWithProjection(
            CLIPVisionConfig(image_size=16, patch_size=8, projection_dim=16, **vision)
        ),
        "image_processor": CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}),
    }


def skyreels_image() -> SkyReelsV2ImageToVideoPipeline:
    transformer = SkyReelsV2Transformer3DModel(
        in_channels=12, out_channels=4, image_dim=16, added_kv_proj_dim=24, **SIZES
    )
    return SkyReelsV2ImageToVideoPipeline(**parts(), **image_parts(), transformer=transformer)


def _forcing_parts() -> dict[str, Any]:
    return parts() | {"transformer": SkyReelsV2Transformer3DModel(in_channels=4, out_channels=4, **SIZES)}


def skyreels_forcing() -> SkyReelsV2DiffusionForcingPipeline:
    """Its frames have times of their own."""
    return SkyReelsV2DiffusionForcingPipeline(**_forcing_parts())


def skyreels_forcing_image() -> SkyReelsV2DiffusionForcingImageToVideoPipeline:
    return SkyReelsV2DiffusionForcingImageToVideoPipeline(**_forcing_parts())


def _sana_parts() -> dict[str, Any]:
    tokenizer = tokens.gemma()
    return {
        "tokenizer": tokenizer,
        "text_encoder": components.gemma_2(len(tokenizer)),
        "vae": vae(),
        "transformer": SanaVideoTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_layers=2,
            num_attention_heads=2,
            attention_head_dim=12,
            num_cross_attention_heads=2,
            cross_attention_head_dim=12,
            cross_attention_dim=24,
            caption_channels=tokens.WIDTH,
            sample_size=30,
            rope_max_seq_len=32,
        ),
    }


def sana_video() -> SanaVideoPipeline:
    scheduler = DPMSolverMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=8.0)
    return SanaVideoPipeline(**_sana_parts(), scheduler=scheduler)


def sana_video_image() -> SanaImageToVideoPipeline:
    return SanaImageToVideoPipeline(**_sana_parts(), scheduler=FlowMatchEulerDiscreteScheduler(shift=8.0))


@contextmanager
def small_sana_videos() -> Iterator[None]:
    """Replace the list of sizes from which SANA-Video chooses by a small one."""
    sizes = {"1.0": [64.0, 64.0]}
    with (
        mock.patch.object(pipeline_sana_video, "ASPECT_RATIO_480_BIN", sizes),
        mock.patch.object(pipeline_sana_video_i2v, "ASPECT_RATIO_480_BIN", sizes),
    ):
        yield


PIPELINES = {
    "wan-vace": vace,
    "skyreels-v2": skyreels,
    "skyreels-v2-i2v": skyreels_image,
    "skyreels-v2-df": skyreels_forcing,
    "skyreels-v2-df-i2v": skyreels_forcing_image,
    "sana-video": sana_video,
    "sana-video-i2v": sana_video_image,
}
