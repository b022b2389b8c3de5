"""Jobs with different noise schedulers and options share forwards, and get the images of diffusers' own calls."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from harness.engine import DIFFUSERS_AND_NUMPY, SIDE, EngineHarness, a_job, a_spec

from shared.config.scheduler_choices import SchedulerChoice, choice_of

pytestmark = [pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY), pytest.mark.usefixtures("shared_models")]

TOLERANCE = 1e-4  # of the image's range, before it becomes 8 bits
STEPS = 5


@pytest.fixture
def floats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output images as floats of 0 to 1, because 8 bits would hide small differences."""
    monkeypatch.setattr("worker.engine.pipelines.call_results.to_pixels", as_floats)


def as_floats(image: torch.Tensor) -> np.ndarray:
    return image.permute(1, 2, 0).float().cpu().numpy()


# Name or options of a job; what a plain call sets instead: the class, its options, arguments of the call.
OF_NOISE: list[tuple[Any, str | None, dict[str, Any], dict[str, Any]]] = [
    (None, None, {}, {}),
    ("euler_a", "EulerAncestralDiscreteScheduler", {}, {}),
    ("DPM++ 2M Karras", "DPMSolverMultistepScheduler", {"use_karras_sigmas": True}, {}),
    (
        "dpmpp_2m_sde_karras",
        "DPMSolverMultistepScheduler",
        {"use_karras_sigmas": True, "algorithm_type": "sde-dpmsolver++"},
        {},
    ),
    ("DPM++ SDE", "DPMSolverSinglestepScheduler", {"algorithm_type": "sde-dpmsolver++"}, {}),
    (SchedulerChoice(name="euler", exponential=True), "EulerDiscreteScheduler", {"use_exponential_sigmas": True}, {}),
    (SchedulerChoice(name="euler", spacing="trailing"), "EulerDiscreteScheduler", {"timestep_spacing": "trailing"}, {}),
    (
        SchedulerChoice(name="dpmpp_2m", timesteps=(950, 700, 400, 150, 20)),
        "DPMSolverMultistepScheduler",
        {},
        {"timesteps": [950, 700, 400, 150, 20]},
    ),
    (
        SchedulerChoice(name="euler", sigmas=(12.0, 6.0, 2.5, 0.8, 0.1)),
        "EulerDiscreteScheduler",
        {},
        {"sigmas": [12.0, 6.0, 2.5, 0.8, 0.1]},
    ),
]
OF_FLOW: list[tuple[Any, str | None, dict[str, Any], dict[str, Any]]] = [
    ("euler", "FlowMatchEulerDiscreteScheduler", {}, {}),
    (SchedulerChoice(shift=6.0), None, {"shift": 6.0, "use_dynamic_shifting": False}, {}),
    (SchedulerChoice(karras=True), None, {"use_karras_sigmas": True}, {}),
    (SchedulerChoice(sigmas=(1.0, 0.8, 0.55, 0.3, 0.1)), None, {}, {"sigmas": [1.0, 0.8, 0.55, 0.3, 0.1]}),
]


def plain(loaded: Any, job: Any, class_name: str | None, options: dict[str, Any], call: dict[str, Any]) -> np.ndarray:
    pipeline = copy.copy(loaded)
    scheduler_class = type(loaded.scheduler) if class_name is None else getattr(diffusers, class_name)
    pipeline.scheduler = scheduler_class.from_config(loaded.scheduler.config, **options)
    result = pipeline(
        prompt=job.prompt,
        num_inference_steps=STEPS,
        guidance_scale=job.guidance_scale,
        generator=torch.Generator().manual_seed(job.seed),
        width=SIDE,
        height=SIDE,
        output_type="pt",
        **call,
    )
    return as_floats(result.images[0])


@pytest.mark.usefixtures("floats")
@pytest.mark.parametrize(("model", "cases", "is_flow"), [("sdxl", OF_NOISE, False), ("sd3", OF_FLOW, True)])
def test_schedulers_and_options_are_mixed_in_one_forward(
    tiny_models: Path, model: str, cases: list[Any], is_flow: bool
) -> None:
    folder, jobs = tiny_models / model, []
    for at, (chosen, *_) in enumerate(cases):
        choice = choice_of(chosen, None, is_flow)
        named = {"scheduler": choice.name, "scheduler_options": choice.options}
        jobs.append(a_job(f"job-{at}", prompt="a hill", seed=7, steps=STEPS, **named))
    recorder = EngineHarness(a_spec(folder, max_batch=16)).run(*jobs)
    assert [recorder.finished[job.id].error for job in jobs] == [None] * len(jobs)
    assert recorder.rows[0] == len(jobs)
    loaded: Any = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    loaded.set_progress_bar_config(disable=True)
    images = []
    for job, (_, class_name, options, call) in zip(jobs, cases, strict=True):
        expected = plain(loaded, job, class_name, options, call)
        assert np.abs(recorder.images[job.id, 0] - expected).max() <= TOLERANCE, job
        images.append(expected)
    different = [np.abs(one - other).max() > 1e-2 for at, one in enumerate(images) for other in images[:at]]
    assert all(different), "equal images would prove nothing"
