"""Jobs continue from their checkpoints in another engine, with the image that they would have had."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from harness.checkpoints import halfway, resumed
from harness.engine import DIFFUSERS_AND_NUMPY, EngineHarness, a_job, a_spec

from shared.job_fields import Task
from worker.engine.remote import RemoteEngine

pytestmark = [pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY), pytest.mark.usefixtures("shared_models")]

SCHEDULERS = (
    *("EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler", "UniPCMultistepScheduler", "LCMScheduler"),
    *("DPMSolverMultistepScheduler", "DDPMScheduler", "HeunDiscreteScheduler", "PNDMScheduler", "TCDScheduler"),
    *("KDPM2AncestralDiscreteScheduler", "DEISMultistepScheduler", "SASolverScheduler", "IPNDMScheduler"),
    *("DPMSolverSinglestepScheduler", "EDMEulerScheduler"),
)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_an_image_continues_with_any_noise_scheduler(scheduler: str, tiny_models: Path) -> None:
    """What a scheduler keeps of earlier steps, and the generators from which it draws, are in the checkpoint."""
    spec = a_spec(tiny_models / "sd", schedulers=SCHEDULERS)
    outcome = resumed(spec, a_job("one", steps=8, scheduler=scheduler))
    assert outcome.difference == 0.0
    assert outcome.resumed.finished["one"].resumed_steps >= 4
    whole, rest = outcome.steps_computed
    assert 0 < rest <= whole - 4


@pytest.mark.parametrize("guidance_scale", [1.0, 4.0])
def test_an_image_continues_with_guidance_by_two_calls(
    guidance_scale: float, tiny_model: Callable[[str], Path]
) -> None:
    spec = a_spec(tiny_model("qwen-image"), tasks=(Task.TEXT_TO_IMAGE,))
    outcome = resumed(spec, a_job("one", steps=6, guidance_scale=guidance_scale))
    assert outcome.difference == 0.0
    assert outcome.steps_computed == ((12, 6) if guidance_scale > 1 else (6, 3))


def test_the_images_of_a_job_continue_each_with_its_seed(tiny_models: Path) -> None:
    outcome = resumed(a_spec(tiny_models / "sd"), a_job("three", n=3, steps=6))
    assert outcome.difference == 0.0
    assert [image and image.step for image in outcome.checkpoint.images] == [3, 3, 3]
    assert outcome.resumed.finished["three"].resumed_steps == 9
    assert outcome.resumed.rows == [3, 3, 3]


def test_a_job_continues_in_another_process(tiny_models: Path) -> None:
    outcome = resumed(a_spec(tiny_models / "sd"), a_job("one", steps=6), RemoteEngine)
    assert outcome.difference == 0.0
    assert outcome.steps_computed == (6, 3)


def test_a_job_that_continues_joins_a_running_batch_and_counts_on(tiny_models: Path) -> None:
    spec = a_spec(tiny_models / "sd")
    job = a_job("one", steps=6)
    whole = EngineHarness(spec).run(job, checkpoint_s=0.0)
    file = halfway(whole).images[0]
    assert file is not None
    harness = EngineHarness(spec)
    harness.submit(a_job("mate", steps=4))
    harness.submit(job, checkpoints=(file.data,))
    with harness.started():
        harness.recorder.wait_for(["one", "mate"])
    assert max(harness.recorder.rows) == 2
    assert [entry[2:] for entry in harness.recorder.log if entry[:2] == ("progress", "one")][:2] == [(3, 6), (4, 6)]
    assert np.abs(harness.recorder.images["one", 0].astype(float) - whole.images["one", 0]).max() <= 1
