"""Why a queued job waits, from its place in the queue and the live workers."""

from __future__ import annotations

import pytest

from api.jobs.queue_reason import queue_reason
from shared.queue import UnavailableModel, WorkerInfo
from shared.queue.order.position import QueueReason

READY = WorkerInfo("w1", ("demo",), loaded=("demo",))
OTHER_MODEL = WorkerInfo("w2", ("other",), loaded=("other",))
STARTING = WorkerInfo("w3", ("demo",), state="starting")
DRAINING = WorkerInfo("w4", ("demo",), state="draining", loaded=("demo",))
NOT_LOADED = WorkerInfo("w5", ("demo", "other"), loaded=("other",))
HUB_IS_AWAY = {"demo": UnavailableModel("connection refused", permanent=False, retry_in_s=5.0)}
UNAVAILABLE = WorkerInfo("w6", ("demo",), state="unavailable", unavailable=HUB_IS_AWAY)
SERVES_OTHERS = WorkerInfo("w7", ("demo", "other"), unavailable=HUB_IS_AWAY)


@pytest.mark.parametrize(
    ("workers", "in_queue", "reason"),
    [
        ((), "next", "no_worker"),
        ((OTHER_MODEL,), "next", "no_worker"),
        ((STARTING, OTHER_MODEL), "jobs_ahead", "worker_starting"),
        ((STARTING, UNAVAILABLE, DRAINING), "jobs_ahead", "worker_starting"),
        ((UNAVAILABLE, DRAINING), "next", "model_unavailable"),
        ((SERVES_OTHERS,), "next", "model_unavailable"),
        ((DRAINING, OTHER_MODEL), "jobs_ahead", "workers_draining"),
        ((READY,), "tenant_limit", "tenant_limit"),
        ((), "tenant_limit", "no_worker"),
        ((READY,), "batch_mates", "batch_mates"),
        ((NOT_LOADED, OTHER_MODEL), "jobs_ahead", "model_loading"),
        ((NOT_LOADED, READY), "jobs_ahead", "jobs_ahead"),
        ((READY,), "idle_worker", "idle_worker"),
        ((NOT_LOADED,), "idle_worker", "model_loading"),
        ((NOT_LOADED,), "batch_mates", "batch_mates"),
        ((), "paused", "paused"),
        ((), "waiting", "waiting"),
        ((READY, DRAINING, UNAVAILABLE), "next", "next"),
    ],
)
def test_the_first_reason_that_applies(workers: tuple[WorkerInfo, ...], in_queue: str, reason: str) -> None:
    assert queue_reason(QueueReason(in_queue), "demo", workers) == QueueReason(reason)
