"""Pipelines that change shared modules during a call: each job's changes are its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from harness.engine import DIFFUSERS_AND_NUMPY, TIMEOUT_S, EngineHarness, a_job, a_spec
from harness.waiting import wait_until
from parity.running import as_floats, compare, plain_results
from tiny import registry

from shared.job import Job
from shared.job_fields import Priority
from shared.tasks import Task

pytestmark = [pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY), pytest.mark.usefixtures("shared_models")]


@pytest.fixture(scope="module")
def perturbed(models_folder: Path) -> Path:
    """Stable Diffusion with perturbed attention guidance, which replaces attention processors."""
    source = models_folder / "sd-pag"
    return source if (source / "model_index.json").exists() else registry.save_tiny("sd-pag", source)


def jobs() -> list[Job]:
    return [
        a_job("two", prompt="a dog", n=2, steps=3),
        a_job("unguided", prompt="a town at night", guidance_scale=1.0, steps=4),
        a_job("short", prompt="a mill", steps=2, guidance_scale=7.0),
    ]


def test_jobs_with_perturbed_attention_get_their_own_images(perturbed: Path) -> None:
    """Their forwards are not fused, and say why; the images of one job are made side by side like those of others."""
    with as_floats():
        recorder = EngineHarness(a_spec(perturbed, tasks=(Task.TEXT_TO_IMAGE,))).run(*jobs())
        assert [recorder.finished[job.id].error for job in jobs()] == [None] * 3
        compare(recorder, plain_results(perturbed, jobs()))
    assert set(recorder.rows) == {1}
    reason = recorder.finished["two"].batching.solo_reason
    assert reason is not None
    assert "changes UNet2DConditionModel" in reason


@pytest.mark.parity
def test_a_canceled_or_preempted_job_leaves_no_changes_behind(perturbed: Path) -> None:
    """An interactive job runs in the middle of a bulk job, which is then canceled; the next one gets its image."""
    with as_floats():
        harness = EngineHarness(a_spec(perturbed, tasks=(Task.TEXT_TO_IMAGE,)))
        with harness.started() as engine:
            harness.submit(a_job("bulk", steps=900, priority=Priority.BULK))
            wait_until(lambda: len(harness.recorder.forwards) > 2, "the bulk job runs", TIMEOUT_S)
            urgent, after = (job.model_copy(update={"priority": Priority.INTERACTIVE}) for job in jobs()[1:])
            harness.submit(urgent)
            harness.recorder.wait_for([urgent.id])
            engine.cancel("bulk")
            harness.recorder.wait_for(["bulk"])
            harness.submit(after)
            harness.recorder.wait_for([after.id])
        compare(harness.recorder, plain_results(perturbed, [urgent, after]))


@pytest.mark.parity
def test_reproducible_jobs_with_perturbed_attention_are_bit_identical(perturbed: Path) -> None:
    """Copies of a call do not fill its forward up: its processor divides all rows into three parts."""
    exact = a_job("exact", reproducible=True, steps=2)
    mates = [job.model_copy(update={"reproducible": True}) for job in jobs()]
    with as_floats():
        spec = a_spec(perturbed, tasks=(Task.TEXT_TO_IMAGE,))
        solo, among = EngineHarness(spec).run(exact), EngineHarness(spec).run(*mates, exact)
        compare(solo, plain_results(perturbed, [exact]))
    assert np.array_equal(solo.images["exact", 0], among.images["exact", 0])
