"""The rows of the image families."""

from __future__ import annotations

from parity.cells import LATE, PICTURES, TEXT, TEXT_AND_PICTURES, Cell

_BOTH = {**TEXT, **PICTURES}

CELLS = (
    Cell(
        family="Stable Diffusion",
        models="Stable Diffusion 1.x",
        pipelines="StableDiffusionPipeline, StableDiffusionImg2ImgPipeline",
        tiny="sd",
        tasks=TEXT_AND_PICTURES,
        jobs=_BOTH | {"own-scheduler": {"prompt": "a mill", "scheduler": "EulerDiscreteScheduler"}},
        joining=LATE,
        spec={"schedulers": ("EulerDiscreteScheduler",)},
        quick=True,
    ),
    Cell(
        family="Stable Diffusion",
        models="Stable Diffusion XL",
        pipelines="StableDiffusionXLPipeline, StableDiffusionXLImg2ImgPipeline",
        tiny="sdxl",
        tasks=TEXT_AND_PICTURES,
        jobs=_BOTH,
        joining=LATE,
    ),
    Cell(
        family="Stable Diffusion 3",
        models="SD3 Medium",
        pipelines="StableDiffusion3Pipeline, StableDiffusion3Img2ImgPipeline",
        tiny="sd3",
        tasks=TEXT_AND_PICTURES,
        jobs=_BOTH,
        joining=LATE,
        quick=True,
    ),
    Cell(
        family="FLUX.1",
        models="FLUX.1 dev",
        pipelines="FluxPipeline, FluxImg2ImgPipeline",
        tiny="flux",
        tasks=TEXT_AND_PICTURES,
        jobs=_BOTH,
        joining=LATE,
        quick=True,
    ),
)
