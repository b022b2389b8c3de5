"""Noise schedulers of flow models by name: images are those of plain diffusers with the options for a flow."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from harness.engine import DIFFUSERS_AND_NUMPY, SIDE, EngineHarness, a_job, a_spec
from parity.running import TOLERANCE, as_floats

from shared.job import Job

pytestmark = [pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY), pytest.mark.usefixtures("shared_models")]

NAMES = {
    "sd3-16": ("UniPCMultistepScheduler", "DPMSolverMultistepScheduler"),
    "flux": ("UniPCMultistepScheduler", "DPMSolverMultistepScheduler", "DEISMultistepScheduler"),
}


def plain(pipeline: Any, job: Job) -> np.ndarray:
    own = pipeline.scheduler
    options = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": own.config.shift}
    if job.scheduler is not None:
        pipeline.scheduler = getattr(diffusers, job.scheduler).from_config(own.config, **options)
        if pipeline.scheduler.config.get("use_dynamic_shifting") is False:  # refused, though FLUX always passes it
            set_timesteps = pipeline.scheduler.set_timesteps
            pipeline.scheduler.set_timesteps = functools.wraps(set_timesteps)(
                lambda *arguments, mu=None, **named: set_timesteps(*arguments, **named)
            )
    generator = torch.Generator().manual_seed(job.seed)
    sampling = {"num_inference_steps": job.steps, "guidance_scale": job.guidance_scale, "output_type": "pt"}
    with torch.no_grad():
        image = pipeline(job.prompt, width=SIDE, height=SIDE, generator=generator, **sampling).images[0]
    pipeline.scheduler = own
    return np.moveaxis(image.numpy(), -3, -1)


@pytest.mark.parametrize("tiny", NAMES)
def test_jobs_with_them_get_the_plain_images(tiny: str, tiny_model: Callable[[str], Path]) -> None:
    source, names = tiny_model(tiny), NAMES[tiny]
    jobs = [a_job(str(name), prompt="a dog", steps=6, scheduler=name, seed=3) for name in (None, *names)]
    with as_floats():
        recorder = EngineHarness(a_spec(source, schedulers=names)).run(*jobs)
    assert {job.id: error for job in jobs if (error := recorder.finished[job.id].error) is not None} == {}
    pipeline: Any = DiffusionPipeline.from_pretrained(source, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    for job in jobs:
        made = np.moveaxis(recorder.outputs[job.id, 0].pixels, -3, -1)
        assert np.abs(made - plain(pipeline, job)).max() <= TOLERANCE, job.id


def test_one_that_cannot_be_used_costs_only_its_own_jobs(tiny_model: Callable[[str], Path]) -> None:
    jobs = [a_job("own", steps=2), a_job("noise", steps=2, scheduler="DDIMScheduler")]
    recorder = EngineHarness(a_spec(tiny_model("flux"), schedulers=("DDIMScheduler",))).run(*jobs)
    error = recorder.finished["noise"].error
    assert (recorder.finished["own"].error, error and error.param) == (None, "scheduler")
    assert "DDIMScheduler removes noise" in str(error)
