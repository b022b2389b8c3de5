"""The refiner of XL, which has one text encoder and aesthetic scores: by itself, and for the last steps of the base."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from harness.engine import DIFFUSERS_AND_NUMPY, EngineHarness, a_job, a_spec
from parity.running import TOLERANCE, as_floats, compare, plain_results

from shared.job_fields import Task

pytestmark = [pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY), pytest.mark.usefixtures("shared_models")]

IMAGE_TASKS = (Task.IMAGE_TO_IMAGE, Task.INPAINT)


@pytest.mark.parametrize("task", IMAGE_TASKS)
def test_a_refiner_is_a_model_like_others(task: Task, tiny_model: Callable[[str], Path]) -> None:
    source, common = tiny_model("sdxl-refiner"), {"task": task, "steps": 6, "strength": 0.7, "prompt": "a dog, a hill"}
    jobs = [a_job(name, **common, seed=seed) for seed, name in enumerate(("first", "second", "third"))]
    jobs[2] = jobs[2].model_copy(update={"negative_prompt": "rain, snow", "guidance_scale": 9.0})
    with as_floats():
        recorder = EngineHarness(a_spec(source, tasks=IMAGE_TASKS)).run(*jobs)
        assert {job.id: recorder.finished[job.id].error for job in jobs} == dict.fromkeys(job.id for job in jobs)
        assert compare(recorder, plain_results(source, jobs)) <= TOLERANCE
    assert recorder.rows[0] == len(jobs)
