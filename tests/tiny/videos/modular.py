"""Tiny modular pipelines of videos, of the parts of classic ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from diffusers import LTX2VideoDiffusionDecoderModel
from tiny.images.modular import modular


def ltx_2_5() -> Any:
    """Its decoder denoises; duration head and prompt enhancer are absent."""
    decoder = LTX2VideoDiffusionDecoderModel(
        latent_channels=4,
        patch_size=2,
        decoder_head_dim=16,
        decoder_stage_channels=(32, 32, 16),
        decoder_stage_depths=(1, 1, 1),
        decoder_stage_kernels=((3, 3, 3), (3, 3, 3)),
        decoder_upsample_strides=((2, 1, 1), (1, 2, 2)),
        decoder_upsample_channel_reductions=(1, 2),
        decoder_stage5_kernel=(3, 3, 3),
        decoder_t_emb_dim=16,
        spatial_compression_ratio=4,
        temporal_compression_ratio=2,
    )
    return modular("LTX25ModularPipeline", "videos.ltx2", "ltx-2.3", diffusion_decoder=decoder)


PIPELINES: dict[str, Callable[[], Any]] = {
    "modular-wan": partial(modular, "WanModularPipeline", "videos.wan", "wan-2.1-t2v"),
    "modular-wan-2.2": partial(modular, "Wan22ModularPipeline", "videos.wan", "wan-2.2-t2v"),
    "modular-wan-i2v": partial(modular, "WanImage2VideoModularPipeline", "videos.wan", "wan-2.1-i2v"),
    "modular-wan-2.2-i2v": partial(modular, "Wan22Image2VideoModularPipeline", "videos.wan", "wan-2.2-i2v"),
    "modular-hunyuan-video-1.5": partial(
        modular, "HunyuanVideo15ModularPipeline", "videos.hunyuan", "hunyuan-video-1.5"
    ),
    "modular-hunyuan-video-1.5-i2v": partial(
        modular, "HunyuanVideo15ModularPipeline", "videos.hunyuan", "hunyuan-video-1.5-i2v"
    ),
    "modular-helios": partial(modular, "HeliosModularPipeline", "videos.helios", "helios"),
    "modular-helios-mid": partial(modular, "HeliosPyramidModularPipeline", "videos.helios", "helios-mid"),
    "modular-ltx": partial(modular, "LTXModularPipeline", "more.ltx", "ltx-video"),
    "modular-ltx-2": partial(modular, "LTX2ModularPipeline", "videos.ltx2", "ltx-2.3"),
    "modular-ltx-2.5": ltx_2_5,
    "modular-echo": partial(modular, "EchoModularPipeline", "videos.ltx2", "ltx-2.3"),
}
