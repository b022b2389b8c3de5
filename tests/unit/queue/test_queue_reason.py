"""Why a queued job waits, from its position and the live workers."""

from __future__ import annotations

import pytest

from api.jobs.queue_reason import QueueReason, queue_reason
from shared.queue import QueuePosition, UnavailableModel, WorkerInfo

NEXT = QueuePosition(0, None)
FIFTH = QueuePosition(5, 60.0)
READY = WorkerInfo("w1", ("demo",), loaded=("demo",))
OTHER_MODEL = WorkerInfo("w2", ("other",), loaded=("other",))
STARTING = WorkerInfo("w3", ("demo",), state="starting")
DRAINING = WorkerInfo("w4", ("demo",), state="draining", loaded=("demo",))
NOT_LOADED = WorkerInfo("w5", ("demo", "other"), loaded=("other",))
HUB_IS_AWAY = {"demo": UnavailableModel("connection refused", permanent=False, retry_in_s=5.0)}
UNAVAILABLE = WorkerInfo("w6", ("demo",), state="unavailable", unavailable=HUB_IS_AWAY)
SERVES_OTHERS = WorkerInfo("w7", ("demo", "other"), unavailable=HUB_IS_AWAY)


@pytest.mark.parametrize(
    ("workers", "position", "reason"),
    [
        ((), NEXT, "no_worker"),
        ((OTHER_MODEL,), NEXT, "no_worker"),
        ((STARTING, OTHER_MODEL), FIFTH, "worker_starting"),
        ((STARTING, UNAVAILABLE, DRAINING), FIFTH, "worker_starting"),
        ((UNAVAILABLE, DRAINING), NEXT, "model_unavailable"),
        ((SERVES_OTHERS,), NEXT, "model_unavailable"),
        ((DRAINING, OTHER_MODEL), FIFTH, "workers_draining"),
        ((READY,), QueuePosition(0, None, limited=True), "tenant_limit"),
        ((), QueuePosition(0, None, limited=True), "no_worker"),
        ((READY,), QueuePosition(1, None, ready=False), "batch_mates"),
        ((NOT_LOADED, OTHER_MODEL), FIFTH, "model_loading"),
        ((NOT_LOADED, READY), FIFTH, "jobs_ahead"),
        ((READY,), QueuePosition(0, None, must_run_solo=True), "idle_worker"),
        ((READY, DRAINING, UNAVAILABLE), NEXT, "next"),
    ],
)
def test_the_first_reason_that_applies(workers: tuple[WorkerInfo, ...], position: QueuePosition, reason: str) -> None:
    assert queue_reason(position, "demo", workers) == QueueReason(reason)
