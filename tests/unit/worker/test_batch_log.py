"""Why a batch held no more, and what kept a job out of it: each row says why."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import structlog

from shared.config.models_file import Catalog, ModelSpec
from shared.job import Adapter, Job
from shared.queue import Claim
from shared.runtime import metrics
from shared.signature import differences, signature
from worker.batch_log import BatchLimits, BatchLog, stopped_by
from worker.engine import ForwardDone
from worker.job_runner import ClaimedJob

EIGHT: dict[str, Any] = {"max_batch": 8, "ruled": 8, "fits": 8, "paying": 8, "window_ms": 50}


@pytest.mark.parametrize(
    ("growth", "reason", "why"),
    [
        (BatchLimits(**EIGHT, seats=8), "full", "as many as the models file allows"),
        (BatchLimits(**EIGHT | {"fits": 4}, seats=4), "memory", "memory once held no more than four"),
        (BatchLimits(**EIGHT | {"fits": 4, "paying": 4}, seats=4), "memory", "what pays is counted up to what fits"),
        (BatchLimits(**EIGHT | {"paying": 4}, seats=4), "cap", "a fifth would not have paid"),
        (BatchLimits(**EIGHT | {"ruled": 2, "fits": 2, "paying": 2}, seats=2), "cap", "a rule allows two"),
        (BatchLimits(**EIGHT, seats=3, overdue=True), "overdue", "jobs waited that had to let others go first"),
        (BatchLimits(**EIGHT, seats=8, overdue=True), "full", "the others came too late to matter"),
        (BatchLimits(**EIGHT, seats=3, queued_ms=50), "window", "the first had waited for company long enough"),
        (BatchLimits(**EIGHT, seats=1, queued_ms=3), "solo", "no company was likely: it did not wait for any"),
        (BatchLimits(**EIGHT, seats=1, queued_ms=90, solo=True), "solo", "it was lost once"),
    ],
)
def test_a_batch_says_what_stopped_it(growth: BatchLimits, reason: str, why: str) -> None:
    """Memory, what pays and rules count where they bind before `max_batch` does."""
    assert stopped_by(growth) == reason, why


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model": "other", "width": 512}, ("model",)),
        ({"width": 512}, ("shape",)),
        ({"frames": 9, "height": 512}, ("frames", "shape")),
        ({"adapters": (Adapter(id="ink"),)}, ("adapters",)),
        ({"steps": 3, "prompt": "another", "guidance_scale": 9.0}, ()),
    ],
)
def test_what_keeps_two_jobs_apart_is_named(
    make_job: Callable[..., Job], changes: dict[str, Any], told: tuple[str, ...]
) -> None:
    """By field, so that the counter has as many series as a job has shared fields."""
    one, other = make_job(), make_job(**changes)
    assert differences(one, other) == told
    assert bool(told) == (signature(one) != signature(other))


def count(name: str, **labels: str) -> float:
    return metrics.REGISTRY.get_sample_value(name, labels) or 0.0


async def test_a_batch_is_told_in_one_line_when_its_last_job_has_left(make_job: Callable[..., Job]) -> None:
    """Jobs that join belong to it; one of another size that had to wait tells what kept it apart."""
    spec = ModelSpec(id="of-batches", source="none", max_batch=8, window_ms=50)
    batches = BatchLog(Catalog((spec,)))
    runs = [_run(make_job(model=spec.id), spec, queued_ms=60 * at) for at in range(1, 4)]
    apart = _run(make_job(model=spec.id, width=768), spec, queued_ms=5000)
    kept, stopped = count("fusequeue_batch_mismatches_total", field="shape"), {"model": spec.id, "stopped_by": "window"}
    with structlog.testing.capture_logs() as logs:
        for run in runs:
            batches.admit(run)
        for rows in (3, 2):
            batches.forward(ForwardDone(spec.id, rows, rows, 0.2, "cpu", "64x64", claim_key=runs[0].key))
        assert batches.seats == 3
        for run in (*runs, *runs):
            batches.leave(run)
        batches.admit(apart)
        batches.leave(apart)
        await asyncio.sleep(0)
    told = [line for line in logs if line["event"] == "batch"]
    assert [line["jobs"] for line in told] == [3, 1]
    first = told[0]
    assert (first["forwards"], first["mean_rows"], first["most_rows"], first["forward_ms"]) == (2, 2.5, 3, 400)
    assert (first["stopped_by"], first["longest_wait_ms"]) == ("window", 180)
    assert [(line["model"], line["batch_mismatches"]) for line in told] == [(spec.id, ()), (spec.id, ("shape",))]
    assert count("fusequeue_batches_total", **stopped) == 2
    assert count("fusequeue_batch_mismatches_total", field="shape") == kept + 1
    assert count("fusequeue_forward_seconds_count", model=spec.id, rows="3-4") == 1
    assert count("fusequeue_forward_seconds_count", model=spec.id, rows="2") == 1


async def test_a_job_that_came_later_was_not_kept_apart(make_job: Callable[..., Job]) -> None:
    """It never waited while the other batch ran."""
    spec = ModelSpec(id="of-batches", source="none", max_batch=8)
    batches = BatchLog(Catalog((spec,)))
    first = _run(make_job(model=spec.id), spec)
    batches.admit(first)
    batches.leave(first)
    kept = count("fusequeue_batch_mismatches_total", field="shape")
    batches.admit(_run(make_job(model=spec.id, width=768), spec))
    assert count("fusequeue_batch_mismatches_total", field="shape") == kept


def _run(job: Job, spec: ModelSpec, queued_ms: int = 0) -> ClaimedJob:
    return ClaimedJob(Claim(job, signature(job), epoch=1, attempt=1, solo=False, queued_ms=queued_ms), spec)
