"""What others see of this worker: how far its jobs are, how long its forwards take, and that it is alive."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import structlog

from shared.config.models_file import Catalog
from shared.errors import RedisUnavailable
from shared.job import Phase
from shared.queue import ProgressReport, Queue, WorkerInfo
from shared.runtime.clock import now_ms
from shared.runtime.version import VERSION
from worker.cost_curves import CostCurves
from worker.engine import EngineInterface, EngineStatus, ForwardDone
from worker.job_runner import ClaimedJob

log = structlog.get_logger()

FLUSH_EVERY_S = 0.1
STORE_EVERY_S = 1.0
BEAT_EVERY_S = 0.5
LEARN_EVERY_S = 5.0
SILENT_S = 3.0  # several beats: one that is late is no outage


class ProgressReporter:
    """Publishes progress at most ten times a second, stores it once a second and at a new phase, beats twice a second.

    What it tells may be lost while Redis is away: the next telling says it anew.
    """

    def __init__(
        self, queue: Queue, runs: dict[str, ClaimedJob], curves: CostCurves, worker: str, catalog: Catalog
    ) -> None:
        self._queue = queue
        self._runs = runs
        self._curves = curves
        self._seats = max(spec.max_batch for spec in catalog)
        self._beat_s: float | None = None  # time.monotonic() of the last heartbeat that Redis took
        self._changed: set[str] = set()
        self._stored: dict[str, tuple[Phase, float]] = {}  # phase and time.monotonic()
        self._unstored: set[str] = set()
        self._info = WorkerInfo(
            id=worker,
            models=tuple(spec.id for spec in catalog),
            state="starting",
            host=socket.gethostname(),
            pid=os.getpid(),
            version=VERSION,
            started_at_ms=now_ms(),
        )

    def note(self, run: ClaimedJob) -> None:
        """Remember that a run has got further; it is told with the next flush."""
        self._changed.add(run.key)

    def count_forward(self, facts: ForwardDone) -> None:
        """Add one forward to the worker's counters."""
        self._info = replace(
            self._info, forwards=self._info.forwards + 1, forward_rows=self._info.forward_rows + facts.rows
        )

    def become(self, state: Literal["starting", "ready", "draining"]) -> None:
        self._info = replace(self._info, state=state)
        if state == "ready":
            self._info = replace(self._info, ready_at_ms=now_ms())

    def unready(self) -> str | None:
        """Return why no jobs are taken now; None: they are."""
        if self._info.state != "ready":
            return f"the worker is {self._info.state}"
        if self._beat_s is None or time.monotonic() - self._beat_s > SILENT_S:
            return f"Redis has taken no heartbeat for {SILENT_S:g} s"
        return None

    async def report_progress(self) -> None:
        """Tell those who listen how far the runs are, for as long as the worker lives."""
        while True:
            await asyncio.sleep(FLUSH_EVERY_S)
            changed, self._changed = self._changed, set()
            try:
                await self._report([run for key in changed | self._unstored if (run := self._runs.get(key))], changed)
            except RedisUnavailable as error:
                log.debug("progress_not_told", error=error.message)
            for key in self._stored.keys() - self._runs.keys():
                del self._stored[key]
            self._unstored &= self._runs.keys()

    async def _report(self, runs: Sequence[ClaimedJob], changed: set[str]) -> None:
        """Tell how far the runs are, and store what was not stored for a second or is of another phase by now."""
        now = time.monotonic()
        reports: dict[str, ProgressReport] = {}
        for run in runs:
            phase, at = self._stored.get(run.key, (None, 0.0))
            store = phase is not run.phase or now - at >= STORE_EVERY_S
            if store or run.key in changed:
                reports[run.key] = ProgressReport(run.claim.job.id, run.claim.epoch, run.phase, run.progress, store)
        self._unstored |= reports.keys()  # until Redis has taken it
        if reports:
            await self._queue.claims.report_progress(*reports.values())
        stored = {key: (one.phase, now) for key, one in reports.items() if one.store}
        self._stored |= stored
        self._unstored -= stored.keys()

    async def beat(self, engine: EngineInterface) -> None:
        """Say that this worker is there, for as long as it lives."""
        learned_at = time.monotonic()
        start_told = False
        while True:
            try:
                await self.beat_once(engine.status())
                if not start_told and self._info.ready_at_ms:
                    await self._queue.workers.learn_start_time(
                        (self._info.ready_at_ms - self._info.started_at_ms) / 1000
                    )
                    start_told = True
                await self._curves.recall(self._queue)
                if time.monotonic() - learned_at > LEARN_EVERY_S:
                    learned_at = time.monotonic()
                    await self._curves.teach(self._queue)
            except RedisUnavailable as error:
                log.debug("heartbeat_missed", error=error.message)
            await asyncio.sleep(BEAT_EVERY_S)

    async def beat_once(self, engine: EngineStatus) -> None:
        seated = sum(run.claim.job.slots for run in self._runs.values() if run.occupies_seats)
        info = replace(self._info, running_jobs=len(self._runs), running_slots=seated, slots=self._seats)
        info = replace(info, free_slots=max(0, self._seats - seated))
        info = replace(info, memory_bytes=engine.memory_bytes, models_bytes=engine.models_bytes)
        spent = engine.thread_time
        info = replace(info, busy_s=round(spent.busy_s, 3), idle_while_queued_s=round(spent.idle_while_queued_s, 3))
        loaded = engine.loaded_models
        # A model of jobs in hand is on its way into memory, unless that failed. Who takes no jobs holds none.
        held = {*loaded, *(run.spec.id for run in self._runs.values())} - engine.unavailable_models.keys()
        await self._queue.workers.heartbeat(
            replace(info, device=engine.device, loaded=loaded), held if info.state == "ready" else ()
        )
        self._beat_s = time.monotonic()
