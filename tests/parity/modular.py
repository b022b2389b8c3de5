"""The rows of modular pipelines."""

from __future__ import annotations

from parity.cells import (
    IMAGES,
    LATE,
    MASKED,
    TEXT,
    TEXT_AND_IMAGES,
    THREE_TASKS,
    Cell,
    edits,
    small_images,
)
from parity.images import ALIKE, ALIKE_LATE

from shared.job_fields import Task

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

CELLS: tuple[Cell, ...] = (*_SEVERAL_TASKS, *_EQUAL_LENGTHS, *_MODULAR_ONLY)
