"""Workers that are drained or killed in the middle of long jobs, which go on elsewhere from their checkpoints."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness.http_server import ROOT
from harness.waiting import wait_until
from PIL import Image

STEPS = 150
JOBS = 8
CHECKPOINT_S = 0.3
COMPARED = (0, 3)


@pytest.fixture(scope="module")
def stack(make_shared_stack: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Long jobs are allowed, and a drain is too short for them."""
    models = tmp_path_factory.mktemp("models") / "models.toml"
    text = (ROOT / "models.toml").read_text().replace('"demo/model"', f'"{ROOT / "demo/model"}"')
    text = text.replace("max_steps = 100", "max_steps = 1000", 1)
    models.write_text(text.replace("compile = false", f"checkpoint_s = {CHECKPOINT_S}\ncompile = false", 1))
    return make_shared_stack(models=str(models), drain_timeout_s="1", lease_ms="4000").start(workers=0)


def body(seed: int) -> dict[str, Any]:
    return {"prompt": "a red circle on a blue ground, left", "steps": STEPS, "seed": seed, "reproducible": True}


def pixels(stack: Any, job_id: str) -> Any:
    response = stack.client.get(f"/v1/jobs/{job_id}/artifacts/0")
    assert response.status_code == 200, response.text
    return np.asarray(Image.open(io.BytesIO(response.content)))


def running_from(stack: Any, job_ids: list[str], step: int) -> bool:
    """Return whether all jobs run, half of them beyond a step: reproducible jobs of four images share a forward."""
    jobs = [stack.job(job_id) for job_id in job_ids]
    far = sum(job["progress"]["step"] >= step for job in jobs)
    return far >= len(jobs) / 2 and all(job["status"] == "running" for job in jobs)


def used_steps(stack: Any) -> int:
    return sum(int(row["steps"]) for row in stack.read("/v1/usage")["data"])


@pytest.fixture(scope="module")
def undisturbed(stack: Any) -> Any:
    """The images of the compared seeds."""
    worker = stack.worker()
    jobs = {seed: stack.submit(**body(seed)) for seed in COMPARED}
    assert [stack.finish(job_id)["resumed_at_step"] for job_id in jobs.values()] == [None] * len(COMPARED)
    assert worker.stop() == 0
    return {seed: pixels(stack, job_id) for seed, job_id in jobs.items()}


def test_a_drained_worker_leaves_at_once_and_its_jobs_go_on_elsewhere(stack: Any, undisturbed: Any) -> None:
    before, worker = used_steps(stack), stack.worker()
    jobs = [stack.submit(**body(seed)) for seed in range(JOBS)]
    wait_until(lambda: running_from(stack, jobs, 10), "all jobs run")
    started = time.monotonic()
    assert worker.stop() == 0
    seconds = time.monotonic() - started
    stack.worker()
    ended = [stack.finish(job_id) for job_id in jobs]
    print(f"{seconds:.1f} s from SIGTERM to exit; steps {used_steps(stack) - before} of {JOBS * STEPS}")
    assert seconds < 8
    assert [(job["status"], job["attempts"]) for job in ended] == [("succeeded", 1)] * JOBS
    resumed = [job["resumed_at_step"] or 0 for job in ended]
    assert sum(step >= 10 for step in resumed) >= JOBS / 2
    assert [step + job["batching"]["forwards"] for step, job in zip(resumed, ended, strict=True)] == [STEPS] * JOBS
    assert used_steps(stack) - before == JOBS * STEPS
    for seed in COMPARED:
        assert np.array_equal(pixels(stack, jobs[seed]), undisturbed[seed])


def test_a_job_of_a_killed_worker_goes_on_from_its_last_checkpoint(stack: Any, undisturbed: Any) -> None:
    for process in stack.processes:
        if process.name.startswith("worker"):
            process.kill()
    worker = stack.worker()
    job_id = stack.submit(**body(3))
    wait_until(lambda: job_id in worker.text() and "checkpoint_stored" in worker.text(), "a checkpoint is stored")
    worker.kill()
    stack.worker()
    job = stack.finish(job_id)
    assert (job["status"], job["attempts"]) == ("succeeded", 2)
    assert job["resumed_at_step"] > 0
    assert job["resumed_at_step"] + job["batching"]["forwards"] == STEPS
    assert np.array_equal(pixels(stack, job_id), undisturbed[3])
