"""Progress reports of a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from shared.errors import RedisUnavailable
from shared.job import Phase
from shared.job_fields import Priority
from shared.job_record import Progress
from shared.queue import ProgressReport, WorkerInfo
from shared.runtime.asyncio_tools import cancel_and_wait
from worker import progress
from worker.cost_curves import CostCurves
from worker.engine.engine_status import EngineStatus
from worker.progress import ProgressReporter

Eventually = Callable[..., Awaitable[None]]


class QueueWithOutage:
    """A queue whose Redis refuses the first report."""

    def __init__(self) -> None:
        self.claims = self
        self.reports: list[tuple[ProgressReport, ...]] = []

    async def report_progress(self, *reports: ProgressReport) -> int:
        self.reports.append(reports)
        if len(self.reports) == 1:
            raise RedisUnavailable("outage")
        return len(reports)


async def test_report_that_redis_refused_is_sent_again(eventually: Eventually) -> None:
    """Otherwise a job without further progress would show an old state."""
    queue: Any = QueueWithOutage()
    claim = SimpleNamespace(job=SimpleNamespace(id="job_1"), epoch=3)
    state = {"phase": Phase.DECODING, "progress": Progress(step=8, total=8)}
    claimed: Any = SimpleNamespace(claim_key="job_1:3", claim=claim, **state)
    catalog: Any = [SimpleNamespace(id="demo", max_batch=8)]
    reporter = ProgressReporter(queue, {claimed.claim_key: claimed}, CostCurves(), "worker-1", catalog)
    reporter.mark_changed(claimed)
    reporting = asyncio.create_task(reporter.report_progress())
    try:
        await eventually(lambda: len(queue.reports) == 2, "the report is sent again")
    finally:
        await cancel_and_wait((reporting,))
    (report,) = queue.reports[1]
    assert report == ProgressReport("job_1", 3, Phase.DECODING, Progress(step=8, total=8), store=True)
    assert queue.reports == [(report,), (report,)]


class QueueOfHeartbeats:
    """A queue that keeps the heartbeats it gets."""

    def __init__(self) -> None:
        self.workers = self
        self.infos: list[WorkerInfo] = []

    async def heartbeat(self, info: WorkerInfo, _: object) -> None:
        self.infos.append(info)


async def test_heartbeats_say_how_many_jobs_are_bulk(eventually: Eventually) -> None:
    queue: Any = QueueOfHeartbeats()
    spec = SimpleNamespace(id="demo", max_batch=8)
    claimed: Any = {
        name: SimpleNamespace(job=SimpleNamespace(priority=priority), slots=1, occupies_slots=True, spec=spec)
        for name, priority in (("a", Priority.BULK), ("b", Priority.BULK), ("c", Priority.STANDARD))
    }
    catalog: Any = [spec]
    engine: Any = SimpleNamespace(status=lambda: EngineStatus("cpu"))
    reporter = ProgressReporter(queue, claimed, CostCurves(), "worker-1", catalog)
    sending = asyncio.create_task(reporter.send_heartbeats(engine))
    try:
        await eventually(lambda: bool(queue.infos), "a heartbeat is sent")
    finally:
        await cancel_and_wait((sending,))
    assert (queue.infos[0].running_jobs, queue.infos[0].bulk_jobs) == (3, 2)


async def test_a_change_of_state_is_sent_at_once(eventually: Eventually, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a ready worker is not seen for up to half a second."""
    monkeypatch.setattr(progress, "HEARTBEAT_EVERY_S", 3600.0)
    queue: Any = QueueOfHeartbeats()
    catalog: Any = [SimpleNamespace(id="demo", max_batch=8)]
    engine: Any = SimpleNamespace(status=lambda: EngineStatus("cpu", loaded_models=("demo",)))
    costs: Any = SimpleNamespace(load=lambda _: asyncio.sleep(0))
    reporter = ProgressReporter(queue, {}, costs, "worker-1", catalog)
    sending = asyncio.create_task(reporter.send_heartbeats(engine))
    try:
        await eventually(lambda: len(queue.infos) == 1, "the first heartbeat is sent")
        reporter.set_state("draining")
        await eventually(lambda: len(queue.infos) == 2, "the state is sent")
    finally:
        await cancel_and_wait((sending,))
    assert [info.state for info in queue.infos] == ["starting", "draining"]
