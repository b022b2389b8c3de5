"""The rows of modular pipelines."""

from __future__ import annotations

from importlib import import_module

from harness.engine import SIDE
from parity.cells import (
    IMAGES,
    LATE,
    MASKED,
    REPAINTED,
    REPAINTED_LATE,
    TEXT,
    TEXT_AND_IMAGES,
    THREE_TASKS,
    Cell,
    edits,
    small_images,
)
from parity.images import ALIKE, ALIKE_LATE

from shared.config.request_limits import Defaults, Limits
from shared.tasks import Task

_FAMILY = "Modular pipelines"
_TEXT, _EDIT = (Task.TEXT_TO_IMAGE,), (Task.EDIT,)

_SEVERAL_TASKS = tuple(
    Cell(
        family=_FAMILY,
        models=models,
        pipelines=pipelines,
        tiny=tiny,
        tasks=tasks,
        jobs={**TEXT, **IMAGES, **(MASKED if Task.INPAINT in tasks else {})},
        joining=LATE,
        quick=tiny == "modular-qwen-image",
    )
    for models, pipelines, tiny, tasks in (
        ("Stable Diffusion XL", "StableDiffusionXLModularPipeline", "modular-sdxl", THREE_TASKS),
        ("SD3", "StableDiffusion3ModularPipeline", "modular-sd3", TEXT_AND_IMAGES),
        ("FLUX.1", "FluxModularPipeline", "modular-flux", TEXT_AND_IMAGES),
        ("Qwen-Image", "QwenImageModularPipeline", "modular-qwen-image", THREE_TASKS),
        ("Z-Image", "ZImageModularPipeline", "modular-z-image", TEXT_AND_IMAGES),
    )
)

_TEXTS = tuple(
    Cell(family=_FAMILY, models=models, pipelines=pipelines, tiny=tiny, jobs=TEXT, joining=LATE)
    for models, pipelines, tiny in (
        ("FLUX.2 dev: text", "Flux2ModularPipeline", "modular-flux-2-dev"),
        ("FLUX.2 Klein: text", "Flux2KleinModularPipeline", "modular-flux-2-klein"),
        ("FLUX.2 Klein base: text", "Flux2KleinBaseModularPipeline", "modular-flux-2-klein-base"),
        ("FLUX.1 Kontext: text", "FluxKontextModularPipeline", "modular-flux-kontext"),
        ("ERNIE-Image", "ErnieImageModularPipeline", "modular-ernie-image"),
    )
) + tuple(
    Cell(
        family=_FAMILY,
        models=models,
        pipelines=pipelines,
        tiny=tiny,
        jobs=TEXT,
        joining=LATE,
        around=lambda: import_module("tiny.more.krea").few_layers(),  # type: ignore[no-any-return]
    )
    for models, pipelines, tiny in (
        ("Krea 2", "Krea2ModularPipeline", "modular-krea-2"),
        ("Krea 2 Turbo", "Krea2TurboModularPipeline", "modular-krea-2-turbo"),
    )
)

_EDITS = (
    *(
        Cell(
            family=_FAMILY,
            models=f"{models}: edit",
            pipelines=pipelines,
            tiny=tiny,
            tasks=_EDIT,
            jobs=edits(TEXT, image_count=images),
            joining=edits(LATE, image_count=images),
            around=small_images(module),
        )
        for models, pipelines, tiny, images, module in (
            ("FLUX.2 dev", "Flux2ModularPipeline", "modular-flux-2-dev", 2, "images.flux"),
            ("FLUX.2 Klein", "Flux2KleinModularPipeline", "modular-flux-2-klein", 1, "images.flux"),
            ("FLUX.2 Klein base", "Flux2KleinBaseModularPipeline", "modular-flux-2-klein-base", 1, "images.flux"),
            ("FLUX.1 Kontext", "FluxKontextModularPipeline", "modular-flux-kontext", 1, "images.flux"),
            ("Qwen-Image-Edit", "QwenImageEditModularPipeline", "modular-qwen-image-edit", 1, "images.qwen"),
            (
                "Qwen-Image-Edit-2509 and -2511",
                "QwenImageEditPlusModularPipeline",
                "modular-qwen-image-edit-plus",
                3,
                "images.qwen",
            ),
        )
    ),
    Cell(
        family=_FAMILY,
        models="Qwen-Image-Edit: inpaint",
        pipelines="QwenImageEditModularPipeline",
        tiny="modular-qwen-image-edit",
        tasks=(Task.INPAINT,),
        jobs=REPAINTED,
        joining=REPAINTED_LATE,
        around=small_images("images.qwen"),
    ),
    Cell(
        family=_FAMILY,
        models="Qwen-Image-Layered",
        pipelines="QwenImageLayeredModularPipeline",
        tiny="modular-qwen-image-layered",
        tasks=_EDIT,
        jobs=edits(TEXT, layers=2),
        joining=edits(LATE, layers=2),
        spec={
            "defaults": Defaults(width=SIDE, height=SIDE, steps=4, layers=2),
            "limits": Limits(multiple_of=16, max_layers=2),
        },
        around=small_images("images.qwen"),
    ),
)

_EQUAL_LENGTHS = tuple(
    Cell(
        family=_FAMILY,
        models=f"{models}: {what}",
        pipelines=pipelines,
        tiny=tiny,
        tasks=tasks,
        jobs=jobs,
        joining=joining,
        fused_rows=len(ALIKE) - 1,
        around=small_images("images.qwen21"),
        limits="only prompts of equal length share a forward: positions are those of the first row",
    )
    for models, pipelines, tiny in (
        ("Qwen-Image 2.1", "QwenImage21ModularPipeline", "modular-qwen-image-2.1"),
        ("Qwen-Image 2.1 Turbo", "QwenImage21TurboModularPipeline", "modular-qwen-image-2.1-turbo"),
    )
    for what, tasks, jobs, joining in (
        ("text", _TEXT, ALIKE, ALIKE_LATE),
        ("edit", _EDIT, edits(ALIKE), edits(ALIKE_LATE)),
    )
)

# By default every prompt is padded to 2048 tokens.
_SHORT = {"max_sequence_length": 192}

_MODULAR_ONLY = (
    Cell(
        family=_FAMILY,
        models="Anima",
        pipelines="AnimaModularPipeline",
        tiny="anima",
        tasks=TEXT_AND_IMAGES,
        jobs={**TEXT, **IMAGES},
        joining=LATE,
    ),
    Cell(
        family=_FAMILY,
        models="Ideogram 4",
        pipelines="Ideogram4ModularPipeline",
        tiny="modular-ideogram-4",
        jobs={name: {**fields, **_SHORT} for name, fields in TEXT.items()},
        joining={name: {**fields, **_SHORT} for name, fields in LATE.items()},
    ),
    *(
        Cell(
            family=_FAMILY,
            models=f"{models}: {what}",
            pipelines=pipelines,
            tiny=tiny,
            tasks=tasks,
            jobs=edits(TEXT, image_count=images) if images else TEXT,
            joining=edits(LATE, image_count=images) if images else LATE,
            limits="prompts share a forward if their tokens fill as many windows of 80, as text has no mask",
        )
        for models, pipelines, tiny in (
            ("FLUX.3", "Flux3ModularPipeline", "flux-3"),
            ("FLUX.3 distilled", "Flux3DistilledModularPipeline", "flux-3-distilled"),
        )
        for what, tasks, images in (("text", _TEXT, 0), ("one reference", _EDIT, 1), ("two references", _EDIT, 2))
    ),
)

CELLS: tuple[Cell, ...] = (*_SEVERAL_TASKS, *_TEXTS, *_EDITS, *_EQUAL_LENGTHS, *_MODULAR_ONLY)
