"""The rows of the image families."""

from __future__ import annotations

from collections.abc import Mapping

from parity.cells import LATE, PICTURES, TEXT, TEXT_AND_PICTURES, Cell, Fields, small

_BOTH = {**TEXT, **PICTURES}


def _turbo(jobs: Mapping[str, Fields]) -> dict[str, Fields]:
    """Return `jobs` without guidance and in few steps, as distilled models are used."""
    return {
        name: {**fields, "guidance_scale": 0.0, "steps": 1 + at % 4} for at, (name, fields) in enumerate(jobs.items())
    }


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
        family="Stable Diffusion",
        models="Stable Diffusion XL Turbo",
        pipelines="StableDiffusionXLPipeline, StableDiffusionXLImg2ImgPipeline",
        tiny="sdxl",
        tasks=TEXT_AND_PICTURES,
        jobs=_turbo(_BOTH),
        joining=LATE,
    ),
    *(
        Cell(
            family="Stable Diffusion 3",
            models=models,
            pipelines="StableDiffusion3Pipeline, StableDiffusion3Img2ImgPipeline",
            tiny=tiny,
            tasks=TEXT_AND_PICTURES,
            jobs=_BOTH,
            joining=LATE,
            quick=tiny == "sd3",
        )
        for models, tiny in (
            ("SD3 Medium", "sd3"),
            ("SD3.5 Medium", "sd3.5-medium"),
            ("SD3.5 Large, Large Turbo", "sd3.5-large"),
        )
    ),
    *(
        Cell(
            family="FLUX.1",
            models=models,
            pipelines="FluxPipeline, FluxImg2ImgPipeline",
            tiny=tiny,
            tasks=TEXT_AND_PICTURES,
            jobs=_BOTH,
            joining=LATE,
            quick=tiny == "flux",
        )
        for models, tiny in (("FLUX.1 dev", "flux"), ("FLUX.1 schnell", "flux-schnell"))
    ),
    Cell(
        family="Z-Image",
        models="Z-Image, Z-Image-Turbo",
        pipelines="ZImagePipeline, ZImageImg2ImgPipeline",
        tiny="z-image",
        tasks=TEXT_AND_PICTURES,
        jobs=_BOTH | {"turbo": {"prompt": "a fox", "guidance_scale": 0.0, "steps": 4}},
        joining=LATE,
        quick=True,
    ),
    Cell(
        family="Qwen-Image",
        models="Qwen-Image, Qwen-Image-2512",
        pipelines="QwenImagePipeline, QwenImageImg2ImgPipeline",
        tiny="qwen-image",
        tasks=TEXT_AND_PICTURES,
        jobs=_BOTH,
        joining=LATE,
        quick=True,
    ),
    *(
        Cell(
            family="FLUX.2",
            models=models,
            pipelines=pipelines,
            tiny=tiny,
            jobs=TEXT,
            joining=LATE,
            quick=tiny == "flux-2-klein",
        )
        for models, pipelines, tiny in (
            ("FLUX.2 dev", "Flux2Pipeline", "flux-2-dev"),
            ("FLUX.2 Klein 4B and 9B", "Flux2KleinPipeline", "flux-2-klein"),
            ("FLUX.2 Klein base 4B and 9B", "Flux2KleinPipeline", "flux-2-klein-base"),
        )
    ),
    *(
        Cell(
            family="SANA",
            models=models,
            pipelines=pipelines,
            tiny=tiny,
            jobs=TEXT,
            joining=LATE,
            around=small("sana"),
            quick=tiny == "sana",
        )
        for models, pipelines, tiny in (
            ("SANA 600M and 1600M", "SanaPipeline", "sana"),
            ("SANA 1.5 1.6B and 4.8B", "SanaPipeline", "sana-1.5"),
        )
    ),
    Cell(
        family="ERNIE-Image",
        models="ERNIE-Image, ERNIE-Image-Turbo",
        pipelines="ErnieImagePipeline",
        tiny="ernie-image",
        jobs=TEXT,
        joining=LATE,
        quick=True,
    ),
    Cell(
        family="GLM-Image",
        models="GLM-Image",
        pipelines="GlmImagePipeline",
        tiny="glm-image",
        jobs=TEXT,
        joining=LATE,
    ),
)
