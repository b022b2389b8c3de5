"""Keeps claimed jobs this worker's own for as long as it gets somewhere with them."""

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
from worker.engine import Activity, EngineInterface
from worker.job_runner import ClaimedJob, StopReason

log = structlog.get_logger()

LOADING_LIMIT_S = 1800.0
NOTICE_CANCEL_S = 0.5
WATCH_EVERY_S = 0.25


@dataclass(frozen=True)
class StallLimits:
    """How long the GPU thread may be silent before it counts as hung, in seconds."""

    factor: float
    floor_s: float
    loading_s: float = LOADING_LIMIT_S


def stalled(activity: Activity, now_s: float, limits: StallLimits) -> bool:
    """Tell whether the GPU thread hangs: busy, and silent for longer than what it does should ever take."""
    if not activity.busy:
        return False
    silence = now_s - activity.since_s
    if activity.loading:
        return silence > limits.loading_s
    return silence > max(limits.floor_s, limits.factor * (activity.expected_s or 0.0))


class Leases:
    """Renews leases, tells runs that they were canceled, lost or are out of time, and reclaims others' losses."""

    def __init__(
        self, queue: Queue, engine: EngineInterface, runs: dict[str, ClaimedJob], worker: str, settings: Settings
    ) -> None:
        self._queue = queue
        self._engine = engine
        self._runs = runs
        self._worker = worker
        self._lease_s = settings.lease_ms / 1000
        self._limits = StallLimits(settings.stall_factor, settings.stall_floor_s)
        self.hung = asyncio.Event()

    async def renew_leases(self) -> None:
        """Renew at a third of the lease or sooner, unless the GPU thread hangs: then let go, and say so in `hung`.

        A renewal also brings word of cancellations: no client waits for that for long.
        """
        await self._every(min(self._lease_s / 3, NOTICE_CANCEL_S), self.renew)

    async def reclaim_losses(self) -> None:
        """Put back in line what other workers lost, and settle what waited past its deadline."""
        await self._every(self._lease_s / 8, self._reclaim)

    async def watch_deadlines(self) -> None:
        """Stop runs whose deadline has passed."""
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            now = now_ms()
            for run in tuple(self._runs.values()):
                deadline = run.claim.job.deadline_at_ms
                if deadline is not None and deadline <= now:
                    self._stop(run, StopReason.EXPIRED)

    async def renew(self) -> None:
        """Renew every lease once; runs that are no longer ours, or are wanted no more, are stopped."""
        if stalled(self._engine.status().activity, time.monotonic(), self._limits):
            log.error("gpu_thread_hung", running=len(self._runs))
            self.hung.set()
            return
        runs = {run.claim.job.id: run for run in self._runs.values()}
        if not runs:
            return
        renewal = await self._queue.claims.renew(self._worker, {name: run.claim.epoch for name, run in runs.items()})
        for name in renewal.lost:
            self._stop(runs[name], StopReason.LOST)
        for name in renewal.cancel:
            self._stop(runs[name], StopReason.CANCELED)

    async def _reclaim(self) -> None:
        reclaimed = await self._queue.maintenance.reclaim()
        if reclaimed:
            metrics.leases_expired.inc(len(reclaimed))
            log.warning("leases_ran_out", jobs=reclaimed)
        await self._queue.maintenance.expire()

    def _stop(self, run: ClaimedJob, reason: StopReason) -> None:
        if run.stop_reason is None:
            run.stop(reason)
            self._engine.cancel(run.key)

    async def _every(self, period_s: float, action: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(random.uniform(0.7, 1.0) * period_s)
            try:
                await action()
            except RedisUnavailable as error:
                log.warning("upkeep_waits_for_redis", action=action.__name__, error=error.message)
