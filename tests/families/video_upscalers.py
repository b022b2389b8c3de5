"""LTX's upscalers of videos: of the latents of a finished one, in one call of a network."""

from __future__ import annotations

from typing import Any

from diffusers import LTX2LatentUpsamplePipeline, LTXLatentUpsamplePipeline
from diffusers.pipelines.ltx.modeling_latent_upsampler import LTXLatentUpsamplerModel
from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel
from parity.more.families import Clip, video
from tiny.more.ltx import ltx_vae
from tiny.videos import ltx2

from shared.tasks import Task

NORMALIZED = 32  # channels that the layers of an upsampler normalize together


def ltx_upscaler() -> LTXLatentUpsamplePipeline:
    """As of LTX-Video 0.9.7, whose VAE adds noise before it decodes."""
    return LTXLatentUpsamplePipeline(
        vae=ltx_vae(timestep_conditioning=True),
        latent_upsampler=LTXLatentUpsamplerModel(in_channels=8, mid_channels=NORMALIZED, num_blocks_per_stage=1),
    )


def ltx_2_upscaler(**config: Any) -> LTX2LatentUpsamplePipeline:
    vae = ltx2.vae()
    return LTX2LatentUpsamplePipeline(
        vae=vae,
        latent_upsampler=LTX2LatentUpsamplerModel(
            in_channels=vae.config.latent_channels, mid_channels=NORMALIZED, num_blocks_per_stage=1, **config
        ),
    )


PIPELINES = {"ltx-video-upscaler": ltx_upscaler, "ltx-2-upscaler": ltx_2_upscaler}
CALLS = {
    "LTXLatentUpsamplePipeline": "video height width",
    "LTX2LatentUpsamplePipeline": "video height width num_frames",
}
ROWS = (
    video(
        "LTX-Video x2 upscaler",
        "LTXLatentUpsamplePipeline",
        "ltx-video-upscaler",
        Clip(9, 8, 128),
        task=Task.UPSCALE_VIDEO,
        same={"steps": 1},
    ),
    video(
        "LTX-2 x2 upscaler",
        "LTX2LatentUpsamplePipeline",
        "ltx-2-upscaler",
        Clip(9, 8, 128),
        task=Task.UPSCALE_VIDEO,
        same={"steps": 1},
    ),
)
