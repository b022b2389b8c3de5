"""A job's hash, read as a record."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from shared.job import Job, Phase, State, decode, encode
from shared.job_record import Artifact, BatchingStats, Failure, FieldWarning, Outcome, Progress, Timings
from shared.queue import Queue, UnavailableModel, WorkerInfo
from shared.queue.records import paired, record


def test_a_fresh_job_has_no_result(make_job: Callable[..., Job]) -> None:
    """What a submit writes is enough for a record."""
    job = make_job()
    made = record({"job": encode(job), "state": "queued", "event": "5-0"})
    assert made is not None
    assert (made.job, made.state, made.event_id) == (job, State.QUEUED, "5-0")
    assert (made.artifacts, made.error, made.batching, made.started_at_ms) == ((), None, None, None)


async def test_an_outcome_is_read_as_it_was_written(
    fake_queue: Queue, make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of a result is lost between the settle script and a reader."""
    outcome = Outcome(
        state=State.FAILED,
        artifacts=(Artifact(index=0, key="k", content_type="image/png", bytes=3, width=8, height=8, seed=7),),
        error=Failure(code="inference_failed", message='a "quoted"\nreason', retryable=True),
        batching=BatchingStats(forwards=3, max_jobs=2, mean_rows=1.5, solo_reason=None),
        timings=Timings(queue_ms=1, load_ms=2, inference_ms=3, upload_ms=4),
        progress=Progress(step=3, total=8),
        device_seconds=0.1,
        warnings=(FieldWarning(param="mask", message="mask: repaints nothing"),),
    )
    written: dict[str, Any] = {}

    async def settle(worker: str, job_id: str, epoch: int, token: str, **fields: Any) -> bool:
        written.update(fields)
        return True

    monkeypatch.setattr(fake_queue.client.scripts, "settle", settle)
    assert await fake_queue.claims.settle("w1", "job_1", 1, outcome)
    made = record({"job": encode(make_job()), **{name: str(value) for name, value in written.items()}})
    assert made is not None
    assert (made.state, made.artifacts, made.error) == (outcome.state, outcome.artifacts, outcome.error)
    assert (made.batching, made.timings, made.progress) == (outcome.batching, outcome.timings, outcome.progress)
    assert (made.device_seconds, made.warnings) == (0.1, outcome.warnings)


def test_progress_and_phase_are_read(make_job: Callable[..., Job]) -> None:
    """Numbers come as text from Redis."""
    fields = {"job": encode(make_job()), "state": "running", "phase": "denoising", "step": "3", "total": "8"}
    made = record(fields)
    assert made is not None
    assert (made.phase, made.progress) == (Phase.DENOISING, Progress(step=3, total=8))


def test_what_cannot_be_read_is_no_record() -> None:
    """Another version's job, or garbage, never raises into a listing."""
    assert record({}) is None
    assert record({"state": "queued"}) is None
    assert record({"job": "{not json", "state": "queued"}) is None
    assert record({"job": '{"schema_version": 2}', "state": "queued"}) is None


def test_flat_answers_are_paired() -> None:
    """Scripts answer a hash as a flat list."""
    assert paired(["a", "1", "b", "2"]) == {"a": "1", "b": "2"}


def test_time_limit_keeps_its_name_in_the_wire_form(make_job: Callable[..., Job]) -> None:
    """Form 3 calls it `deadline_ms`."""
    wire = encode(make_job(time_limit_ms=5))
    assert json.loads(wire)["deadline_ms"] == 5
    assert decode(wire).time_limit_ms == 5


@pytest.mark.parametrize(
    ("state", "model", "permanent", "serves", "may_serve"),
    [
        ("ready", "demo", None, True, True),
        ("ready", "other", None, False, False),
        ("starting", "demo", None, False, True),
        ("draining", "demo", None, False, False),
        ("unavailable", "demo", False, False, True),
        ("ready", "demo", False, False, True),
        ("ready", "demo", True, False, False),
    ],
)
def test_a_worker_serves_the_models_that_it_can_load(
    state: Any, model: str, permanent: bool | None, serves: bool, may_serve: bool
) -> None:
    """A worker that repeats the load may serve its model later; one with a permanent failure does not."""
    unavailable = {} if permanent is None else {"demo": UnavailableModel("no files", permanent, retry_in_s=1.0)}
    worker = WorkerInfo("w1", ("demo", "spare"), state, unavailable=unavailable)
    assert (worker.serves(model), worker.may_serve(model)) == (serves, may_serve)
