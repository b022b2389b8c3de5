"""Workers that are drained or killed in the middle of long videos, which go on elsewhere from their checkpoints."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import safetensors
import safetensors.torch
from harness.scorers import save_scorer
from harness.waiting import wait_until
from tiny import registry

from shared.queue.checkpoints import JobCheckpoint
from shared.queue.redis_keys import RedisKeys
from worker.engine.checkpoints import file_format

STEPS = 200
JOBS = 8
COMPARED = (0, 3)

MODELS = f"""
[[model]]
id = "film"
source = "wan-2.1-t2v"
tasks = ["text_to_video"]
max_batch = {JOBS}
window_ms = 0
checkpoint_s = 0.1
[model.defaults]
width = 16
height = 16
steps = {STEPS}
frames = 5
fps = 8
[model.limits]
min_side = 16
multiple_of = 16
max_frames = 9
max_steps = {STEPS}
frames_multiple = 4

[[model]]
id = "stills"
source = "sd"
scorer = "scorer"
tasks = ["text_to_image"]
max_batch = 4
window_ms = 0
checkpoint_s = 0.1
[model.defaults]
width = 64
height = 64
steps = 60
[model.limits]
max_images = 4
"""


@pytest.fixture(scope="module")
def stack(make_shared_stack: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A drain is too short for any video."""
    folder = tmp_path_factory.mktemp("models")
    registry.save_tiny("wan-2.1-t2v", folder / "wan-2.1-t2v")
    registry.save_tiny("sd", folder / "sd")
    save_scorer(folder / "scorer")
    (folder / "models.toml").write_text(MODELS)
    settings = {"drain_timeout_s": "0.1", "lease_ms": "4000", "log_level": "DEBUG"}
    return make_shared_stack(models=str(folder / "models.toml"), **settings).start()


def submit(stack: Any, seed: int) -> str:
    return str(stack.submit(model="film", prompt="a red circle", seed=seed, reproducible=True))


def artifact(stack: Any, job_id: str) -> bytes:
    response = stack.client.get(f"/v1/jobs/{job_id}/artifacts/0")
    assert response.status_code == 200, response.text
    return bytes(response.content)


def wait_for_checkpoints(worker: Any, job_ids: list[str], least: int) -> None:
    """Wait until as many of the jobs have a checkpoint; the log says so at once, and records of jobs once a second."""

    def count() -> int:
        text = worker.text()
        return sum(f'"job_id": "{job_id}", "step"' in text for job_id in job_ids)

    wait_until(lambda: count() >= least, f"{least} jobs have checkpoints")


def used_steps(stack: Any) -> int:
    return sum(int(row["steps"]) for row in stack.read("/v1/usage")["data"])


def only_worker(stack: Any) -> Any:
    """Return the worker that an earlier test has left."""
    (worker,) = [one for one in stack.processes if one.name.startswith("worker") and one.process.poll() is None]
    return worker


@contextlib.contextmanager
def frozen(worker: Any) -> Iterator[None]:
    """Stop a worker until all jobs are queued, so that it claims them together: it can be faster than their client."""
    worker.send(signal.SIGSTOP)
    try:
        yield
    finally:
        worker.send(signal.SIGCONT)


@pytest.fixture(scope="module")
def undisturbed(stack: Any) -> dict[int, bytes]:
    """The videos of the compared seeds."""
    jobs = {seed: submit(stack, seed) for seed in COMPARED}
    assert [stack.finish(job_id)["resumed_at_step"] for job_id in jobs.values()] == [None] * len(COMPARED)
    return {seed: artifact(stack, job_id) for seed, job_id in jobs.items()}


def test_a_drained_worker_leaves_at_once_and_its_videos_go_on_elsewhere(
    stack: Any, undisturbed: dict[int, bytes]
) -> None:
    before, worker = used_steps(stack), only_worker(stack)
    with frozen(worker):
        jobs = [submit(stack, seed) for seed in range(JOBS)]
    wait_for_checkpoints(worker, jobs, JOBS // 4)  # two reproducible videos share a forward
    started = time.monotonic()
    assert worker.stop() == 0
    seconds = time.monotonic() - started
    stack.worker()
    ended = [stack.finish(job_id) for job_id in jobs]
    print(f"{seconds:.1f} s from SIGTERM to exit; steps {used_steps(stack) - before} of {JOBS * STEPS}")
    assert seconds < 5
    assert [(job["status"], job["attempts"]) for job in ended] == [("succeeded", 1)] * JOBS
    resumed = [job["resumed_at_step"] or 0 for job in ended]
    assert sum(step > 0 for step in resumed) >= JOBS / 4
    assert used_steps(stack) - before == JOBS * STEPS
    assert {seed: artifact(stack, jobs[seed]) for seed in COMPARED} == undisturbed


def test_a_video_of_a_killed_worker_goes_on_from_its_last_checkpoint(stack: Any, undisturbed: dict[int, bytes]) -> None:
    worker, job_id = only_worker(stack), submit(stack, 3)
    wait_for_checkpoints(worker, [job_id], 1)
    worker.kill()
    stack.worker()
    job = stack.finish(job_id)
    assert (job["status"], job["attempts"]) == ("succeeded", 2)
    assert job["resumed_at_step"] > 0
    assert artifact(stack, job_id) == undisturbed[3]


def test_a_job_of_a_killed_worker_keeps_the_candidates_that_it_would_have_kept(stack: Any) -> None:
    """Two are dropped before, and do not run again; two are compared after it."""
    best_of = {"candidates": 4, "keep": 1, "at": [0.1, 0.8]}
    request = {"model": "stills", "prompt": "a cat", "seed": 5, "best_of": best_of, "reproducible": True}
    first = str(stack.submit(**request))
    whole = stack.finish(first)
    worker, job_id = only_worker(stack), str(stack.submit(**request))
    wait_until(lambda: checkpoint_step(worker, job_id) > 4 * 6 + 2 * 6, "a checkpoint after the first mark")
    worker.kill()
    stack.worker()
    job = stack.finish(job_id)
    assert (job["status"], job["attempts"]) == ("succeeded", 2)
    assert job["resumed_at_step"] > 4 * 6 + 2 * 6
    assert job["batching"]["dropped"] == whole["batching"]["dropped"]
    kept = [(one["seed"], one["score"]) for one in job["artifacts"]]
    assert kept == [(one["seed"], one["score"]) for one in whole["artifacts"]]
    assert artifact(stack, job_id) == artifact(stack, first)


def checkpoint_step(worker: Any, job_id: str) -> int:
    """Return the steps of the last checkpoint of a job in the log of its worker."""
    steps = re.findall(rf'"job_id": "{job_id}", "step": (\d+)', worker.text())
    return int(steps[-1]) if steps else 0


def checkpoint_of(stack: Any, job_id: str) -> JobCheckpoint:
    """Return what the record of a job names."""
    with redis.Redis(port=stack.redis_port, decode_responses=True) as client:
        checkpoint = JobCheckpoint.parsed(client.hget(RedisKeys("default").job(job_id), "checkpoint") or "")
    assert checkpoint is not None, f"{job_id} has a checkpoint"
    return checkpoint


def replace_file(stack: Any, job_id: str, data: bytes, *, in_record: bool = True) -> None:
    """Replace the file of a job's only image in storage, and its digest in the record."""
    (image,) = checkpoint_of(stack, job_id).stored
    (stack.folder / "storage" / image.key).write_bytes(data)
    if in_record:
        digest = hashlib.sha256(data).hexdigest()
        changed = JobCheckpoint(images=(image.model_copy(update={"bytes": len(data), "sha256": digest}),))
        with redis.Redis(port=stack.redis_port) as client:
            client.hset(RedisKeys("default").job(job_id), "checkpoint", changed.wire())


def outdated(file: Path) -> bytes:
    """Return a file as one with other versions of the libraries would have written it."""
    with safetensors.safe_open(file, "pt") as opened:
        metadata = dict(opened.metadata())
    tensors = safetensors.torch.load_file(file)
    header = json.loads(metadata["header"])
    header["identity"]["versions"] = "torch 1.0"
    text = json.dumps(header)
    digest = file_format._digest(text, tensors)
    return safetensors.torch.save(tensors, metadata | {"header": text, "digest": digest})


def stopped_with_checkpoints(stack: Any, *seeds: int) -> dict[str, bytes]:
    """Stop the worker when two videos, which share their forwards, have checkpoints; return those by job."""
    worker = only_worker(stack)
    with frozen(worker):
        jobs = [submit(stack, seed) for seed in seeds]
    wait_for_checkpoints(worker, jobs, len(jobs))
    assert worker.stop() == 0
    keys = {job_id: checkpoint_of(stack, job_id).stored[0].key for job_id in jobs}
    return {job_id: (stack.folder / "storage" / key).read_bytes() for job_id, key in keys.items()}


def begin_anew(stack: Any, jobs: Iterable[str], *reasons: str) -> None:
    """Start a worker, and check that it refuses the checkpoints of jobs, and runs them from their first step."""
    after = stack.worker()
    ended = [stack.finish(job_id) for job_id in jobs]
    assert [(job["status"], job["resumed_at_step"]) for job in ended] == [("succeeded", None)] * len(ended)
    for reason in reasons:
        assert reason in after.text()


def test_a_checkpoint_that_is_damaged_is_refused_and_the_job_begins_anew(
    stack: Any, undisturbed: dict[int, bytes]
) -> None:
    data = stopped_with_checkpoints(stack, 0, 1)
    tampered, truncated = data
    replace_file(stack, truncated, data[truncated][:-8])
    replace_file(stack, tampered, data[tampered][:-1] + bytes([data[tampered][-1] ^ 1]), in_record=False)
    begin_anew(stack, data, "it is not the file that was stored", "is damaged")
    assert artifact(stack, tampered) == undisturbed[0]


def test_a_checkpoint_that_is_not_the_jobs_own_is_refused_and_the_job_begins_anew(
    stack: Any, undisturbed: dict[int, bytes]
) -> None:
    """Also where the record agrees with the file: what it says of itself is checked by the engine."""
    data = stopped_with_checkpoints(stack, 2, 3)
    foreign, old = data
    replace_file(stack, old, outdated(stack.folder / "storage" / checkpoint_of(stack, old).stored[0].key))
    replace_file(stack, foreign, data[old])
    begin_anew(stack, data, "is of another job", "was made with")
    assert artifact(stack, old) == undisturbed[3]
