"""Upscalers in the engine: the size of the result, and inputs that the pipeline refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from harness.engine import EngineHarness, a_job, a_spec

from shared.config.model_spec import ModelSpec
from shared.job_fields import Task

pytestmark = pytest.mark.usefixtures("shared_models")


def upscaler(source: Path) -> ModelSpec:
    return a_spec(source, tasks=(Task.UPSCALE,), extra=("noise_level",))


def test_results_have_the_size_of_the_job(tiny_model: Callable[[str], Path]) -> None:
    """Whatever that of the image is; jobs of one size share forwards, with different inputs too."""
    fields = {"task": Task.UPSCALE, "prompt": "a dog", "steps": 2, "width": 96, "height": 64}
    jobs = [a_job("usual", **fields), a_job("noisy", **fields, extra={"noise_level": 300})]
    recorder = EngineHarness(upscaler(tiny_model("upscaler"))).run(*jobs)
    assert [recorder.finished[job.id].error for job in jobs] == [None, None]
    assert [recorder.images[job.id, 0].shape for job in jobs] == [(64, 96, 3)] * 2
    assert recorder.finished["usual"].batching.max_jobs == 2


def test_an_input_out_of_range_is_named(tiny_model: Callable[[str], Path]) -> None:
    job = a_job("job", task=Task.UPSCALE, steps=2, extra={"noise_level": 5000})
    error = EngineHarness(upscaler(tiny_model("upscaler"))).run(job).finished["job"].error
    assert error is not None
    assert (error.param, "350" in error.message) == ("extra.noise_level", True)
