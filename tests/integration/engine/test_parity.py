"""Fused images of XL equal those of the unmodified pipeline, called for each job without the engine.

Other families are rows of the grid that run in every `make test`.
"""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import AutoPipelineForImage2Image, DiffusionPipeline
from harness.engine import DIFFUSERS_AND_NUMPY, SIDE, EngineHarness, a_job, a_spec, an_image_file

from shared.job import Job
from shared.tasks import Task
from worker.engine.pipelines.input_images import fit_image

pytestmark = [pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY), pytest.mark.usefixtures("shared_models")]

TOLERANCE = 1e-4  # of the image's range, before it becomes 8 bits


@pytest.fixture
def floats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output images as floats of 0 to 1, because 8 bits would hide small differences."""
    monkeypatch.setattr("worker.engine.pipelines.call_results.to_pixels", as_floats)


def as_floats(image: torch.Tensor) -> np.ndarray:
    return image.permute(1, 2, 0).float().cpu().numpy()


def mixed_jobs() -> list[Job]:
    return [
        a_job("plain", prompt="a dog", seed=7),
        a_job("blank", prompt="a dog", seed=7, negative_prompt=""),  # encoded, where no negative prompt is zeros
        a_job("longer", prompt="a very large number of dogs, one behind the other", steps=6, guidance_scale=7.5),
        a_job("unguided", prompt="fog", steps=3, guidance_scale=1.0),
        a_job("negative", prompt="a town at night", negative_prompt="rain, snow", guidance_scale=2.5),
        a_job("two", prompt="a boat", n=2, steps=5),
        a_job("from-image", prompt="a hill", strength=0.5, steps=6),
        a_job("from-image-strongly", prompt="another hill", strength=0.9, steps=4, guidance_scale=6.0),
        a_job("own-scheduler", prompt="a mill", steps=5, scheduler="DPMSolverMultistepScheduler"),
    ]


def loaded(folder: Path) -> Any:
    pipeline: Any = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def solo(loaded: Any, job: Job, index: int) -> np.ndarray:
    """Generate one image with diffusers only."""
    scheduler_class = type(loaded.scheduler) if job.scheduler is None else getattr(diffusers, job.scheduler)
    pipeline = copy.copy(loaded)
    pipeline.scheduler = scheduler_class.from_config(loaded.scheduler.config)
    arguments: dict[str, Any] = {
        "prompt": job.prompt,
        "num_inference_steps": job.steps,
        "guidance_scale": job.guidance_scale,
        "generator": torch.Generator().manual_seed(job.seed + index),
        "output_type": "pt",
    }
    if job.negative_prompt is not None:
        arguments["negative_prompt"] = job.negative_prompt
    if job.task is Task.IMAGE_TO_IMAGE:
        pipeline = AutoPipelineForImage2Image.from_pipe(pipeline)
        arguments["image"] = fit_image(an_image_file(shade=job.seed % 100), SIDE, SIDE)
        arguments["strength"] = job.strength
    if "width" in inspect.signature(pipeline.__call__).parameters:
        arguments |= {"width": SIDE, "height": SIDE}
    return as_floats(pipeline(**arguments).images[0])


@pytest.mark.usefixtures("floats")
def test_each_job_of_a_mixed_batch_gets_the_same_image_as_solo(tiny_models: Path) -> None:
    """Steps, guidance, noise schedulers, prompts, tasks and image counts are mixed in fused forwards."""
    folder, jobs = tiny_models / "sdxl", mixed_jobs()
    spec = a_spec(folder, max_batch=16, schedulers=("DPMSolverMultistepScheduler",))
    recorder = EngineHarness(spec).run(*jobs)

    assert [recorder.finished[job.id].error for job in jobs] == [None] * len(jobs)
    plain, seen = loaded(folder), []
    for job in jobs:
        for index in range(job.n):
            image, expected = recorder.images[job.id, index], solo(plain, job, index)
            assert np.abs(image - expected).max() <= TOLERANCE, f"{job.id} {index}"
            seen.append(expected)
    assert recorder.rows[0] == 10, "all ten images share the first forward"
    assert all(recorder.finished[job.id].batching.max_jobs == 9 for job in jobs)
    different = [np.abs(one - other).max() > 1e-2 for at, one in enumerate(seen) for other in seen[:at]]
    assert all(different), "equal images would prove nothing"
