"""What a worker tells of its jobs' progress."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from shared.errors import RedisUnavailable
from shared.job import Phase, Progress
from shared.queue import ProgressReport
from shared.runtime.cancellation import canceled
from worker.cost_curves import CostCurves
from worker.progress import ProgressReporter

Eventually = Callable[..., Awaitable[None]]


class AwayAtFirst:
    """A queue whose Redis takes the second report, and all after it."""

    def __init__(self) -> None:
        self.claims = self
        self.told: list[tuple[ProgressReport, ...]] = []

    async def report_progress(self, *reports: ProgressReport) -> int:
        self.told.append(reports)
        if len(self.told) == 1:
            raise RedisUnavailable("away")
        return len(reports)


async def test_what_redis_did_not_take_is_told_again(eventually: Eventually) -> None:
    """A job that gets no further for a while would else be shown where it stood before."""
    queue: Any = AwayAtFirst()
    claim = SimpleNamespace(job=SimpleNamespace(id="job_1"), epoch=3)
    run: Any = SimpleNamespace(key="job_1:3", claim=claim, phase=Phase.DECODING, progress=Progress(step=8, total=8))
    catalog: Any = [SimpleNamespace(id="demo", max_batch=8)]
    reporter = ProgressReporter(queue, {run.key: run}, CostCurves(), "worker-1", catalog)
    reporter.mark_changed(run)
    telling = asyncio.create_task(reporter.report_progress())
    try:
        await eventually(lambda: len(queue.told) == 2, "it is told again")
    finally:
        await canceled((telling,))
    (report,) = queue.told[1]
    assert report == ProgressReport("job_1", 3, Phase.DECODING, Progress(step=8, total=8), store=True)
    assert queue.told == [(report,), (report,)]
