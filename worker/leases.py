"""Lease renewal, stop requests for claimed jobs, and reclaiming of jobs that other workers lost."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from shared.config.settings import Settings
from shared.errors import RedisUnavailable
from shared.queue import Queue
from shared.runtime import metrics
from shared.runtime.clock import now_ms
from worker.engine.protocol import Activity, EngineInterface
from worker.job_runner import ClaimedJob, StopReason

log = structlog.get_logger()

MAX_LOADING_S = 1800.0
RENEW_EVERY_S = 0.5  # a renewal also returns cancellations: clients see them within this time
CHECK_DEADLINES_EVERY_S = 0.25


@dataclass(frozen=True)
class StallLimits:
    """How long the GPU thread can be silent before it counts as hung, in seconds."""

    factor: float
    floor_s: float
    loading_s: float = MAX_LOADING_S


def stalled(activity: Activity, now_s: float, limits: StallLimits) -> bool:
    """Return whether the GPU thread is busy and silent for much longer than its current work should take."""
    if not activity.busy:
        return False
    silence_s = now_s - activity.since_s
    if activity.loading:
        return silence_s > limits.loading_s
    return silence_s > max(limits.floor_s, limits.factor * (activity.expected_s or 0.0))


class Leases:
    """Renews leases while the engine makes progress, and stops claimed jobs that are canceled, expired or lost."""

    def __init__(
        self,
        queue: Queue,
        engine: EngineInterface,
        claimed_jobs: dict[str, ClaimedJob],
        worker: str,
        settings: Settings,
    ) -> None:
        self._queue = queue
        self._engine = engine
        self._claimed_jobs = claimed_jobs
        self._worker = worker
        self._lease_s = settings.lease_ms / 1000
        self._limits = StallLimits(settings.stall_factor, settings.stall_floor_s)
        self.hung = asyncio.Event()

    async def renew_leases(self) -> None:
        """Renew periodically until the GPU thread hangs; then set `hung` and let the leases expire."""
        await self._every(min(self._lease_s / 3, RENEW_EVERY_S), self.renew)

    async def reclaim_lost_jobs(self) -> None:
        """Periodically requeue jobs whose lease expired, and settle queued jobs past their deadline."""
        await self._every(self._lease_s / 8, self._reclaim)

    async def stop_expired_jobs(self) -> None:
        """Periodically stop claimed jobs past their deadline."""
        while True:
            await asyncio.sleep(CHECK_DEADLINES_EVERY_S)
            now = now_ms()
            for claimed in tuple(self._claimed_jobs.values()):
                deadline = claimed.job.deadline_at_ms
                if deadline is not None and deadline <= now:
                    self._stop(claimed, StopReason.EXPIRED)

    async def renew(self) -> None:
        """Renew every lease once; stop jobs that are lost or canceled."""
        if stalled(self._engine.status().activity, time.monotonic(), self._limits):
            log.error("gpu_thread_hung", running=len(self._claimed_jobs))
            self.hung.set()
            return
        claimed_jobs = {claimed.job.id: claimed for claimed in self._claimed_jobs.values()}
        if not claimed_jobs:
            return
        epochs = {job_id: claimed.claim.epoch for job_id, claimed in claimed_jobs.items()}
        renewal = await self._queue.claims.renew(self._worker, epochs)
        for job_id in renewal.lost:
            self._stop(claimed_jobs[job_id], StopReason.LOST)
        for job_id in renewal.cancel:
            self._stop(claimed_jobs[job_id], StopReason.CANCELED)

    async def _reclaim(self) -> None:
        reclaimed = await self._queue.maintenance.reclaim()
        if reclaimed:
            metrics.leases_expired.inc(len(reclaimed))
            log.warning("leases_expired", jobs=reclaimed)
        await self._queue.maintenance.expire()

    def _stop(self, claimed: ClaimedJob, reason: StopReason) -> None:
        if claimed.stop_reason is None:
            claimed.stop(reason)
            self._engine.cancel(claimed.key)

    async def _every(self, period_s: float, action: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(random.uniform(0.7, 1.0) * period_s)
            try:
                await action()
            except RedisUnavailable as error:
                log.warning("lease_upkeep_failed", action=action.__name__.strip("_"), error=error.message)
