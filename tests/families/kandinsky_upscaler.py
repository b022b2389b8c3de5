"""Kandinsky 6's upscaler of videos, which denoises one tile after the other."""

from __future__ import annotations

from dataclasses import replace

from diffusers import Kandinsky6SRPipeline, PiflowScheduler
from diffusers.models import Kandinsky6SRLatentUpscalerBank, Kandinsky6SRTransformer3DModel, Kandinsky6SRVAE
from parity.more.families import Clip, video

from shared.tasks import Task

CHANNELS, PREDICTIONS = 4, 4
WIDTHS = (4, 8, 16)  # two levels halve the sides: 4 pixels for each latent
TILES = ((32, 32), (32, 64), (64, 32))  # 8 latents a side, which attention groups


def kandinsky_upscaler() -> Kandinsky6SRPipeline:
    """As the one that is distilled to two steps."""
    return Kandinsky6SRPipeline(
        transformer=Kandinsky6SRTransformer3DModel(
            in_visual_dim=CHANNELS,
            out_visual_dim=CHANNELS * PREDICTIONS,
            time_dim=32,
            model_dim=32,
            ff_dim=48,
            num_visual_blocks=2,
            axes_dims=(4, 6, 6),
            nabla_window=(3, 1, 1),
            tile_sizes=TILES,
        ),
        vae=Kandinsky6SRVAE(
            latent_channels=CHANNELS,
            encoder_block_out_channels=WIDTHS,
            decoder_block_out_channels=WIDTHS,
            layers_per_block=1,
        ),
        scheduler=PiflowScheduler(n_grid=PREDICTIONS),
        latent_upscaler=Kandinsky6SRLatentUpscalerBank(
            in_channels=CHANNELS,
            stage_channels=(8, 8, 8),
            num_pre_blocks=1,
            num_mid_blocks=1,
            num_post_blocks=1,
            num_x2_adapter_blocks=1,
        ),
    )


_ROW = video(
    "Kandinsky 6 upscaler",
    "Kandinsky6SRPipeline",
    "kandinsky-6-upscaler",
    Clip(5, 4, 48),
    task=Task.UPSCALE_VIDEO,
)
_BY_FACTOR = {
    f"by-{factor}": {**_ROW.jobs["plain"], "upscale_factor": factor, "steps": steps}
    for factor, steps in ((2, 2), (4, 4))
}
PIPELINES = {"kandinsky-6-upscaler": kandinsky_upscaler}
CALLS = {"Kandinsky6SRPipeline": "video resolution_scale"}
ROWS = (replace(_ROW, jobs={**_ROW.jobs, **_BY_FACTOR}),)
