"""Progress of jobs and heartbeats of the worker, published through Redis."""

import asyncio
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Literal

import structlog

from shared.config.catalog import Catalog
from shared.errors import RedisUnavailable
from shared.job import Phase
from shared.job_fields import Priority
from shared.queue import ProgressReport, Queue, WorkerInfo
from shared.runtime.clock import VERSION
from worker.claims.claimed_job import ClaimedJob
from worker.cost_curves import CostCurves
from worker.engine.engine_status import EngineStatus
from worker.engine.protocol import EngineInterface, ForwardDone
from worker.model_availability import unavailable_models

log = structlog.get_logger()

PUBLISH_EVERY_S = 0.1
STORE_EVERY_S = 1.0
HEARTBEAT_EVERY_S = 0.5
SAVE_CURVES_EVERY_S = 5.0
HEARTBEAT_TIMEOUT_S = 3.0  # several heartbeats: a late one is no outage


class ProgressReporter:
    """Publishes progress ten times a second; stores it once a second and at each new phase; sends heartbeats.

    What Redis does not accept during an outage is sent again with the next report.
    """

    def __init__(
        self,
        queue: Queue,
        claimed_jobs: dict[str, ClaimedJob],
        cost_curves: CostCurves,
        worker: str,
        catalog: Catalog,
        models_fault: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._queue = queue
        self._claimed_jobs = claimed_jobs
        self._cost_curves = cost_curves
        self._models_fault = models_fault
        self._last_heartbeat_s = float("-inf")  # time.monotonic() of the last one that Redis accepted
        self._changed: set[str] = set()
        self._stored: dict[str, tuple[Phase, float]] = {}  # phase and time.monotonic()
        self._unstored: set[str] = set()
        self._started_at_s = time.monotonic()
        self._ready_at_s: float | None = None
        self._state_changed = asyncio.Event()
        self._info = WorkerInfo(
            id=worker,
            models=tuple(spec.id for spec in catalog),
            state="starting",
            host=socket.gethostname(),
            pid=os.getpid(),
            slots=max(spec.max_batch for spec in catalog),
            version=VERSION,
        )

    @property
    def info(self) -> WorkerInfo:
        """What is known of this worker without its engine."""
        return self._info

    def set_worker_pool(self, name: str) -> None:
        self._info = replace(self._info, worker_pool=name)

    def set_models(self, catalog: Catalog) -> None:
        """Report other models from the next heartbeat on."""
        models = tuple(spec.id for spec in catalog)
        self._info = replace(self._info, models=models, slots=max(spec.max_batch for spec in catalog))
        self._state_changed.set()

    def mark_changed(self, claimed: ClaimedJob) -> None:
        self._changed.add(claimed.claim_key)

    def count_forward(self, forward: ForwardDone) -> None:
        forwards, rows = self._info.forwards + 1, self._info.forward_rows + forward.rows
        self._info = replace(self._info, forwards=forwards, forward_rows=rows)

    def set_state(self, state: Literal["starting", "ready", "draining"]) -> None:
        if state == "ready":
            self._ready_at_s = time.monotonic()
        self._info = replace(self._info, state=state)
        self._state_changed.set()

    def unready(self) -> str | None:
        """Return why no jobs are claimed now; None when they are."""
        if self._info.state != "ready":
            return f"the worker is {self._info.state}"
        if time.monotonic() - self._last_heartbeat_s > HEARTBEAT_TIMEOUT_S:
            return f"Redis has accepted no heartbeat for {HEARTBEAT_TIMEOUT_S:g} s"
        return None

    async def report_progress(self) -> None:
        """Publish the progress of changed jobs until canceled."""
        while True:
            await asyncio.sleep(PUBLISH_EVERY_S)
            changed, self._changed = self._changed, set()
            pending = [self._claimed_jobs[key] for key in changed | self._unstored if key in self._claimed_jobs]
            try:
                await self._report(pending, changed)
            except RedisUnavailable as error:
                log.debug("progress_report_failed", error=error.message)
            for key in self._stored.keys() - self._claimed_jobs.keys():
                del self._stored[key]
            self._unstored &= self._claimed_jobs.keys()

    async def _report(self, claimed_jobs: Sequence[ClaimedJob], changed: set[str]) -> None:
        """Publish progress; store it for a new phase, or when it was last stored a second ago."""
        now = time.monotonic()
        reports = {}
        for claimed in claimed_jobs:
            key, claim = claimed.claim_key, claimed.claim
            phase, stored_at = self._stored.get(key, (None, 0.0))
            store = phase is not claimed.phase or now - stored_at >= STORE_EVERY_S
            if store or key in changed:
                reports[key] = ProgressReport(claim.job.id, claim.epoch, claimed.phase, claimed.progress, store)
        self._unstored |= reports.keys()  # until Redis accepts them
        if reports:
            await self._queue.claims.report_progress(*reports.values())
        stored = {key: (report.phase, now) for key, report in reports.items() if report.store}
        self._stored |= stored
        self._unstored -= stored.keys()

    async def send_heartbeats(self, engine: EngineInterface) -> None:
        """Send heartbeats, one at each change of state, the start time and measured cost curves until canceled."""
        curves_saved_at = time.monotonic()
        start_time_saved = False
        while True:
            self._state_changed.clear()
            try:
                await self._send_heartbeat(engine.status())
                if not start_time_saved and self._info.state == "ready":
                    if self._ready_at_s is not None:  # else an outage would count
                        await self._queue.workers.learn_start_time(self._ready_at_s - self._started_at_s)
                    start_time_saved = True
                await self._cost_curves.load(self._queue)
                if time.monotonic() - curves_saved_at > SAVE_CURVES_EVERY_S:
                    curves_saved_at = time.monotonic()
                    await self._cost_curves.save(self._queue)
            except RedisUnavailable as error:
                log.debug("heartbeat_failed", error=error.message)
            with suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_EVERY_S):
                    await self._state_changed.wait()

    async def _send_heartbeat(self, engine: EngineStatus) -> None:
        claimed_jobs = self._claimed_jobs.values()
        running_slots = sum(claimed.slots for claimed in claimed_jobs if claimed.occupies_slots)
        usable, now_s = engine.usable(self._info.models), time.monotonic()
        if self._info.state == "ready":
            self._ready_at_s = (self._ready_at_s or now_s) if usable else None
        info = replace(
            self._info,
            state="unavailable" if self._info.state == "ready" and not usable else self._info.state,
            device=engine.device,
            loaded=engine.loaded_models,
            loading=engine.loading_models,
            kept=engine.kept_models,
            pinned=engine.pinned_models,
            kept_bytes=engine.kept_bytes,
            models_limit_bytes=engine.models_limit_bytes,
            model_bytes=dict(engine.model_bytes),
            unavailable=unavailable_models(engine.unavailable_models, now_s),
            models_fault=self._models_fault(),
            running_jobs=len(claimed_jobs),
            bulk_jobs=sum(claimed.job.priority is Priority.BULK for claimed in claimed_jobs),
            running_slots=running_slots,
            free_slots=max(0, self._info.slots - running_slots),
            ready_s=None if self._ready_at_s is None else round(now_s - self._ready_at_s, 3),
            memory_bytes=engine.memory_bytes,
            models_bytes=engine.models_bytes,
            busy_s=round(engine.thread_time.busy_s, 3),
            idle_while_queued_s=round(engine.thread_time.idle_while_queued_s, 3),
        )
        # Other workers leave jobs of these models to this one. Those of claimed jobs are being loaded, or failed to.
        held = {*engine.loaded_models, *(claimed.spec.id for claimed in claimed_jobs)}
        held -= engine.unavailable_models.keys()
        has_due = await self._queue.workers.heartbeat(info, held if info.state == "ready" else ())
        self._last_heartbeat_s = time.monotonic()
        if has_due:
            await self._queue.maintenance.queue_due(HEARTBEAT_EVERY_S)
