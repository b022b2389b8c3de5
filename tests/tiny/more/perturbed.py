"""Tiny pipelines with perturbed attention guidance (PAG), which changes attention processors during a call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from diffusers import (
    AnimateDiffPAGPipeline,
    PixArtSigmaPAGPipeline,
    SanaPAGPipeline,
    StableDiffusion3PAGPipeline,
    StableDiffusionPAGPipeline,
    StableDiffusionXLPAGPipeline,
)
from diffusers.pipelines.pag import pipeline_pag_pixart_sigma, pipeline_pag_sana
from tiny.images import inpaint, sana, unlisted
from tiny.more import stable


def perturbed() -> StableDiffusionPAGPipeline:
    return StableDiffusionPAGPipeline(**stable.parts(), **stable.UNCHECKED, requires_safety_checker=False)


def perturbed_xl() -> StableDiffusionXLPAGPipeline:
    return StableDiffusionXLPAGPipeline(**stable.xl_parts())


def perturbed_3() -> StableDiffusion3PAGPipeline:
    parts = inpaint.stable_diffusion_3().components
    for name in ("image_encoder", "feature_extractor"):
        del parts[name]
    return StableDiffusion3PAGPipeline(**parts, pag_applied_layers="transformer_blocks.0")


def perturbed_pixart() -> PixArtSigmaPAGPipeline:
    return PixArtSigmaPAGPipeline(**unlisted.pixart_sigma().components, pag_applied_layers="blocks.0")


def perturbed_sana() -> SanaPAGPipeline:
    return SanaPAGPipeline(**sana.sana().components, pag_applied_layers="transformer_blocks.0")


def animatediff_perturbed() -> AnimateDiffPAGPipeline:
    return AnimateDiffPAGPipeline(**stable.parts(), motion_adapter=stable.motion(), pag_applied_layers="mid_block")


@contextmanager
def small_images() -> Iterator[None]:
    """Replace the lists of sizes from which PixArt-Sigma and SANA choose by small ones."""
    bins = {"1.0": [64.0, 64.0]}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(pipeline_pag_pixart_sigma, "ASPECT_RATIO_512_BIN", bins))
        stack.enter_context(mock.patch.object(pipeline_pag_sana, "ASPECT_RATIO_1024_BIN", bins))
        yield


PIPELINES = {
    "sd-pag": perturbed,
    "sdxl-pag": perturbed_xl,
    "sd3-pag": perturbed_3,
    "pixart-pag": perturbed_pixart,
    "sana-pag": perturbed_sana,
    "animatediff-pag": animatediff_perturbed,
}
