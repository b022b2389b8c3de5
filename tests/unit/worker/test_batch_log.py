"""What limits a batch, and which fields keep jobs out of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import structlog

from shared.config.adapters import Adapter
from shared.config.catalog import Catalog
from shared.config.model_spec import ModelSpec
from shared.job import Job
from shared.queue import Claim
from shared.runtime import metrics
from shared.signature import mismatched_fields, signature
from worker.claims.claimed_job import ClaimedJob
from worker.engine.protocol import ForwardDone
from worker.metrics.batch_log import BatchLimits, BatchLog


@pytest.mark.parametrize(
    ("changes", "reason", "why"),
    [
        ({"peak_slots": 8}, "full", "max_batch of the models file"),
        ({"memory_rows": 4, "peak_slots": 4}, "memory", "memory holds four"),
        ({"memory_rows": 4, "efficient_rows": 4, "peak_slots": 4}, "memory", "memory also limits the efficient rows"),
        ({"efficient_rows": 4, "peak_slots": 4}, "cap", "a fifth row is not efficient"),
        ({"rule_rows": 2, "memory_rows": 2, "efficient_rows": 2, "peak_slots": 2}, "cap", "a rule allows two"),
        ({"peak_slots": 3, "overdue": True}, "overdue", "queued jobs could not join: another signature was overdue"),
        ({"peak_slots": 8, "overdue": True}, "full", "the batch was full before another signature was overdue"),
        ({"peak_slots": 3, "queued_ms": 50}, "window", "the first job waited its whole window"),
        ({"peak_slots": 1, "queued_ms": 3}, "solo", "no batch mates were expected: it did not wait"),
        ({"peak_slots": 1, "queued_ms": 90, "must_run_solo": True}, "solo", "the job was lost before"),
    ],
)
def test_stopped_by_names_the_binding_limit(changes: dict[str, Any], reason: str, why: str) -> None:
    limits = {"max_batch": 8, "rule_rows": 8, "memory_rows": 8, "efficient_rows": 8, "window_ms": 50, **changes}
    assert BatchLimits(**limits).stopped_by() == reason, why


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model": "other", "width": 512}, ("model",)),
        ({"width": 512}, ("shape",)),
        ({"frames": 9, "height": 512}, ("frames", "shape")),
        ({"adapters": (Adapter(id="ink"),)}, ("adapters",)),
        ({"steps": 3, "prompt": "another", "guidance_scale": 9.0}, ()),
    ],
)
def test_differences_name_the_fields_of_unequal_signatures(
    make_job: Callable[..., Job], changes: dict[str, Any], expected: tuple[str, ...]
) -> None:
    """Fields, not values: the counter has as many series as a job has shared fields."""
    first, second = make_job(), make_job(**changes)
    assert mismatched_fields(first, second) == expected
    assert bool(expected) == (signature(first) != signature(second))


def count(name: str, **labels: str) -> float:
    return metrics.REGISTRY.get_sample_value(name, labels) or 0.0


async def test_batch_is_logged_once_when_its_last_job_leaves(make_job: Callable[..., Job]) -> None:
    """Jobs that join belong to it; a queued job of another size records the field that kept it out."""
    spec = ModelSpec(id="of-batches", source="none", max_batch=8, window_ms=50)
    batch_log = BatchLog(Catalog((spec,)))
    joined = [_claimed(make_job(model=spec.id), spec, queued_ms=60 * number) for number in range(1, 4)]
    other = _claimed(make_job(model=spec.id, width=768), spec, queued_ms=5000)
    mismatches = count("fusequeue_batch_mismatches_total", field="shape")
    with structlog.testing.capture_logs() as logs:
        for claimed in joined:
            batch_log.admit(claimed)
        key = joined[0].claim_key
        for rows in (3, 2):
            batch_log.count_forward(ForwardDone(spec.id, rows, rows, 0.2, "cpu", "64x64", claim_key=key))
        assert batch_log.running_slots == 3
        for claimed in (*joined, *joined):
            batch_log.remove(claimed)
        batch_log.admit(other)
        batch_log.remove(other)
        await asyncio.sleep(0)
    events = [event for event in logs if event["event"] == "batch"]
    assert [event["jobs"] for event in events] == [3, 1]
    first = events[0]
    assert (first["forwards"], first["mean_rows"], first["max_rows"], first["forward_ms"]) == (2, 2.5, 3, 400)
    assert (first["stopped_by"], first["max_wait_ms"]) == ("window", 180)
    assert [(event["model"], event["mismatched_fields"]) for event in events] == [(spec.id, ()), (spec.id, ("shape",))]
    assert count("fusequeue_batches_total", model=spec.id, stopped_by="window") == 2
    assert count("fusequeue_batch_mismatches_total", field="shape") == mismatches + 1
    assert count("fusequeue_forward_seconds_count", model=spec.id, rows="3-4") == 1
    assert count("fusequeue_forward_seconds_count", model=spec.id, rows="2") == 1


async def test_job_that_arrives_after_a_batch_is_no_mismatch(make_job: Callable[..., Job]) -> None:
    spec = ModelSpec(id="of-batches", source="none", max_batch=8)
    batch_log = BatchLog(Catalog((spec,)))
    first = _claimed(make_job(model=spec.id), spec)
    batch_log.admit(first)
    batch_log.remove(first)
    mismatches = count("fusequeue_batch_mismatches_total", field="shape")
    batch_log.admit(_claimed(make_job(model=spec.id, width=768), spec))
    assert count("fusequeue_batch_mismatches_total", field="shape") == mismatches


def _claimed(job: Job, spec: ModelSpec, queued_ms: int = 0) -> ClaimedJob:
    return ClaimedJob(Claim(job, signature(job), epoch=1, must_run_solo=False, queued_ms=queued_ms), spec)
