"""The rows of the image families."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import cycle

from harness.engine import SIDE
from parity.cells import (
    IMAGES,
    LATE,
    MASKED,
    REPAINTED,
    REPAINTED_LATE,
    TEXT,
    THREE_TASKS,
    Cell,
    Fields,
    edits,
    small_images,
)

from shared.config.request_limits import Defaults, Limits
from shared.tasks import Task

# Of about the same number of pixels, so that their jobs are claimed together.
SIZES = tuple(
    {"width": width, "height": height, "mixed_fields": ("size",)}
    for width, height in ((64, 64), (80, 48), (48, 80), (96, 48), (48, 96))
)
_BOTH = {**TEXT, **IMAGES}
_ALL = {**_BOTH, **MASKED}
_EDIT = (Task.EDIT,)


# All prompts but the last have one length.
ALIKE: Mapping[str, Fields] = {
    "plain": {"prompt": "a dog", "steps": 5},
    "strongly": {"prompt": "a cat", "steps": 6, "guidance_scale": 7.5},
    "unguided": {"prompt": "a fox", "steps": 5, "guidance_scale": 1.0},
    "negative": {"prompt": "a cow", "negative_prompt": "-", "guidance_scale": 2.5, "steps": 4},
    "few-steps": {"prompt": "a hen", "steps": 3, "guidance_scale": 6.0},
    "another": {"prompt": "a pig", "steps": 6},
    "longer": {"prompt": "a dog and a cat", "steps": 3},
}
ALIKE_LATE: Mapping[str, Fields] = {
    "late": {"prompt": "a bee", "steps": 3},
    "late-too": {"prompt": "an ox", "steps": 4},
}


def _turbo(jobs: Mapping[str, Fields]) -> dict[str, Fields]:
    """Return `jobs` for distilled models: with few steps, of which at least one runs, and no guidance."""
    return {
        name: {**fields, "guidance_scale": 0.0, "steps": max(1 + at % 4, math.ceil(1 / fields.get("strength", 1)))}
        for at, (name, fields) in enumerate(jobs.items())
    }


_STABLE_DIFFUSION = (
    Cell(
        family="Stable Diffusion",
        models="Stable Diffusion 1.x",
        pipelines="StableDiffusionPipeline, ...Img2ImgPipeline, ...InpaintPipeline",
        tiny="sd",
        tasks=THREE_TASKS,
        jobs=_ALL | {"own-scheduler": {"prompt": "a mill", "scheduler": "EulerDiscreteScheduler"}},
        joining=LATE,
        spec={"schedulers": ("EulerDiscreteScheduler",)},
        quick=True,
    ),
    Cell(
        family="Stable Diffusion",
        models="Stable Diffusion 1.x Inpainting (nine channels)",
        pipelines="StableDiffusionInpaintPipeline",
        tiny="sd-inpaint",
        tasks=(Task.INPAINT,),
        jobs=REPAINTED,
        joining=REPAINTED_LATE,
    ),
    Cell(
        family="Stable Diffusion",
        models="Stable Diffusion XL",
        pipelines="StableDiffusionXLPipeline, ...Img2ImgPipeline, ...InpaintPipeline",
        tiny="sdxl",
        tasks=THREE_TASKS,
        jobs=_ALL,
        joining=LATE,
    ),
    Cell(
        family="Stable Diffusion",
        models="Stable Diffusion XL Inpainting (nine channels)",
        pipelines="StableDiffusionXLInpaintPipeline",
        tiny="sdxl-inpaint",
        tasks=(Task.INPAINT,),
        jobs=REPAINTED,
        joining=REPAINTED_LATE,
    ),
    Cell(
        family="Stable Diffusion",
        models="Stable Diffusion XL Turbo",
        pipelines="StableDiffusionXLPipeline, ...Img2ImgPipeline, ...InpaintPipeline",
        tiny="sdxl",
        tasks=THREE_TASKS,
        jobs=_turbo(_ALL),
        joining=LATE,
    ),
    *(
        Cell(
            family="Stable Diffusion 3",
            models=models,
            pipelines="StableDiffusion3Pipeline, ...Img2ImgPipeline, ...InpaintPipeline",
            tiny=tiny,
            tasks=THREE_TASKS,
            jobs=_ALL,
            joining=LATE,
            quick=tiny == "sd3-16",
        )
        for models, tiny in (
            ("SD3 Medium", "sd3-16"),
            ("SD3.5 Medium", "sd3.5-medium"),
            ("SD3.5 Large, Large Turbo", "sd3.5-large"),
        )
    ),
)

_FLUX = (
    *(
        Cell(
            family="FLUX.1",
            models=models,
            pipelines="FluxPipeline, FluxImg2ImgPipeline, FluxInpaintPipeline",
            tiny=tiny,
            tasks=THREE_TASKS,
            jobs=_ALL,
            joining=LATE,
            quick=tiny == "flux",
        )
        for models, tiny in (("FLUX.1 dev", "flux"), ("FLUX.1 schnell", "flux-schnell"))
    ),
    Cell(
        family="FLUX.1",
        models="FLUX.1 Kontext: edit",
        pipelines="FluxKontextPipeline",
        tiny="flux-kontext",
        tasks=_EDIT,
        jobs=edits(TEXT),
        joining=edits(LATE),
        around=small_images("images.flux"),
    ),
    Cell(
        family="FLUX.1",
        models="FLUX.1 Kontext: inpaint",
        pipelines="FluxKontextInpaintPipeline",
        tiny="flux-kontext",
        tasks=(Task.INPAINT,),
        jobs=REPAINTED,
        joining=REPAINTED_LATE,
        around=small_images("images.flux"),
    ),
    Cell(
        family="FLUX.1",
        models="FLUX.1 Fill",
        pipelines="FluxFillPipeline",
        tiny="flux-fill",
        tasks=(Task.INPAINT,),
        jobs=REPAINTED,
        joining=REPAINTED_LATE,
    ),
    *(
        Cell(
            family="FLUX.2",
            models=f"{models}: {what}",
            pipelines=pipelines,
            tiny=tiny,
            tasks=_EDIT if images else (Task.TEXT_TO_IMAGE,),
            jobs=edits(TEXT, image_count=images) if images else TEXT,
            joining=edits(LATE, image_count=images) if images else LATE,
            quick=tiny == "flux-2-klein" and not images,
        )
        for models, pipelines, tiny in (
            ("FLUX.2 dev", "Flux2Pipeline", "flux-2-dev"),
            ("FLUX.2 Klein 4B and 9B", "Flux2KleinPipeline", "flux-2-klein"),
            ("FLUX.2 Klein base 4B and 9B", "Flux2KleinPipeline", "flux-2-klein-base"),
        )
        for what, images in (("text", 0), ("one reference", 1), ("two references", 2))
    ),
    Cell(
        family="FLUX.2",
        models="FLUX.2 Klein 4B and 9B: inpaint",
        pipelines="Flux2KleinInpaintPipeline",
        tiny="flux-2-klein",
        tasks=(Task.INPAINT,),
        jobs=REPAINTED,
        joining=REPAINTED_LATE,
    ),
)

_QWEN = (
    Cell(
        family="Qwen-Image",
        models="Qwen-Image, Qwen-Image-2512",
        pipelines="QwenImagePipeline, ...Img2ImgPipeline, ...InpaintPipeline",
        tiny="qwen-image",
        tasks=THREE_TASKS,
        jobs=_ALL,
        joining=LATE,
        quick=True,
    ),
    Cell(
        family="Qwen-Image",
        models="Qwen-Image-Edit",
        pipelines="QwenImageEditPipeline",
        tiny="qwen-image-edit",
        tasks=_EDIT,
        jobs=edits(TEXT),
        joining=edits(LATE),
        around=small_images("images.qwen"),
    ),
    *(
        Cell(
            family="Qwen-Image",
            models=f"Qwen-Image-Edit-2509 and -2511, FireRed-Image-Edit 1.0 and 1.1: {what}",
            pipelines="QwenImageEditPlusPipeline",
            tiny="qwen-image-edit-plus",
            tasks=_EDIT,
            jobs=edits(TEXT, image_count=images),
            joining=edits(LATE, image_count=images),
            around=small_images("images.qwen"),
        )
        for what, images in (("one image", 1), ("three images", 3))
    ),
    Cell(
        family="Qwen-Image",
        models="Qwen-Image-Layered",
        pipelines="QwenImageLayeredPipeline",
        tiny="qwen-image-layered",
        tasks=_EDIT,
        jobs=edits(TEXT, layers=2),
        joining=edits(LATE, layers=2),
        spec={
            "defaults": Defaults(width=SIDE, height=SIDE, steps=4, layers=2),
            "limits": Limits(multiple_of=16, max_layers=2),
        },
        around=small_images("images.qwen"),
    ),
    *(
        Cell(
            family="Qwen-Image",
            models=f"Qwen-Image 2.1: {what}",
            pipelines="QwenImage21Pipeline",
            tiny="qwen-image-2.1",
            tasks=_EDIT if edited else (Task.TEXT_TO_IMAGE,),
            jobs=edits(ALIKE) if edited else ALIKE,
            joining=edits(ALIKE_LATE) if edited else ALIKE_LATE,
            fused_rows=len(ALIKE) - 1,
            around=small_images("images.qwen21"),
            limits="only prompts of equal length share a forward: positions are those of the first row",
            refused={} if edited else {"image-to-image": {"prompt": "-", "strength": 0.5}, "inpaint": MASKED["masked"]},
        )
        for what, edited in (("text", False), ("one image", True))
    ),
)

CELLS = (
    *_STABLE_DIFFUSION,
    *_FLUX,
    Cell(
        family="Z-Image",
        models="Z-Image, Z-Image-Turbo",
        pipelines="ZImagePipeline, ZImageImg2ImgPipeline, ZImageInpaintPipeline",
        tiny="z-image",
        tasks=THREE_TASKS,
        jobs=_ALL | {"turbo": {"prompt": "a fox", "guidance_scale": 0.0, "steps": 4}},
        joining=LATE,
    ),
    Cell(
        family="Z-Image",
        models="Z-Image, Z-Image-Turbo: five sizes in one forward",
        pipelines="ZImagePipeline, ZImageImg2ImgPipeline, ZImageInpaintPipeline",
        tiny="z-image",
        tasks=THREE_TASKS,
        spec={"mixed_fields": ("size",)},
        jobs={name: {**given, **size} for (name, given), size in zip(_ALL.items(), cycle(SIZES), strict=False)},
        joining={name: {**given, **size} for (name, given), size in zip(LATE.items(), SIZES[3:], strict=False)},
        quick=True,
    ),
    *_QWEN,
    *(
        Cell(
            family="SANA",
            models=models,
            pipelines=pipelines,
            tiny=tiny,
            jobs=TEXT,
            joining=LATE,
            around=small_images("images.sana"),
        )
        for models, pipelines, tiny in (
            ("SANA 600M and 1600M", "SanaPipeline", "sana"),
            ("SANA 1.5 1.6B and 4.8B", "SanaPipeline", "sana-1.5"),
            ("SANA Sprint 0.6B and 1.6B", "SanaSprintPipeline", "sana-sprint"),
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
        jobs=TEXT | {"quoting": {"prompt": 'a sign that reads "open all night"', "steps": 3}},
        joining=LATE,
        fused_rows=sum(fields.get("n", 1) for fields in TEXT.values()),
        limits="prompts that quote texts of different lengths run one after the other; image input, as diffusers joins "
        "into one tensor what transformers wants as a list",
        refused={"its error": {"task": Task.EDIT, "prompt": "a dog", "steps": 2}},
    ),
)
