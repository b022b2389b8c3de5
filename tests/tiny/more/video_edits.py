"""Tiny pipelines that change videos: those of text whose modules do that too, and Lucy Edit."""

from __future__ import annotations

from diffusers import LucyEditPipeline, WanTransformer3DModel
from tiny.more import cogview, stable, wan
from tiny.videos import wan as text


def lucy_edit() -> LucyEditPipeline:
    """The denoiser reads the latents beside those of the video."""
    transformer = WanTransformer3DModel(in_channels=8, out_channels=4, **wan.SIZES)
    return LucyEditPipeline(**wan.parts(), transformer=transformer)


PIPELINES = {
    "lucy-edit": lucy_edit,
    "wan-v2v": text.PIPELINES["wan-2.1-t2v"],
    "cogvideox-v2v": cogview.PIPELINES["cogvideox"],
    "animatediff-v2v": stable.PIPELINES["animatediff"],
}
