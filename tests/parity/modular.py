"""The rows of modular pipelines."""

from __future__ import annotations

from parity.cells import IMAGES, LATE, MASKED, TEXT, TEXT_AND_IMAGES, THREE_TASKS, Cell

from shared.job_fields import Task

CELLS: tuple[Cell, ...] = tuple(
    Cell(
        family="Modular pipelines",
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
