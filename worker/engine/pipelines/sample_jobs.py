"""Jobs that nobody asked for: what the self-check and the probe run."""

from __future__ import annotations

import io

from PIL import Image

from shared.config.models_file import ModelSpec
from shared.job import InputRef, Job, Task
from worker.engine.protocol import InputFiles


def sample_job(spec: ModelSpec, task: Task, at: int, prompt: str, size: tuple[int, int]) -> Job:
    """Return a job of two steps for one result of `spec`; `at` tells it from others."""
    limits, defaults = spec.limits, spec.defaults
    width, height = size
    ref = InputRef(id="sample", key="", content_type="image/png", bytes=0, width=width, height=height)
    edits, pictured = task is Task.EDIT, task not in (Task.TEXT_TO_IMAGE, Task.TEXT_TO_VIDEO)
    return Job(
        id=f"sample-{at}",
        tenant="sample",
        created_at_ms=0,
        model=spec.id,
        width=width,
        height=height,
        # A whole group of frames beside the first one, or as many as are allowed.
        frames=min(limits.frames_multiple + 1, limits.max_frames) if task.makes_video else 1,
        fps=defaults.fps if task.makes_video else None,
        layers=0 if task.makes_video else defaults.layers,
        reference_sizes=(spec.references.size_for(width, height),) if edits else (),
        task=task,
        prompt=prompt,
        seed=at,
        steps=2,
        guidance_scale=defaults.guidance_scale,
        guidance_scale_2=defaults.guidance_scale_2,
        strength=1.0 if task.has_strength else None,
        images=(ref,) if pictured else (),
        mask=ref if task is Task.INPAINT else None,
    )


def sample_files(job: Job) -> InputFiles:
    """Return files for all pictures that a job refers to."""
    file = io.BytesIO()
    Image.radial_gradient("L").save(file, "PNG")
    data = file.getvalue()
    mask, last = (None if ref is None else data for ref in (job.mask, job.last_image))
    return InputFiles(images=(data,) * len(job.images), mask=mask, last_image=last)
