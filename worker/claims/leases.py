"""Lease renewal, stop requests for claimed jobs, and reclaiming of jobs that other workers lost."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass

import structlog

from shared.config.settings import Settings
from shared.errors import RedisUnavailable
from shared.queue import Queue
from shared.runtime import metrics
from worker.claims.claimed_job import ClaimedJob, StopReason
from worker.engine.engine_status import Activity
from worker.engine.protocol import EngineInterface

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


@dataclass(eq=False)
class Leases:
    """Renews leases while the engine makes progress, and stops claimed jobs that are canceled, expired or lost."""

    queue: Queue
    engine: EngineInterface
    claimed_jobs: dict[str, ClaimedJob]
    worker: str
    settings: Settings

    def __post_init__(self) -> None:
        self._limits = StallLimits(self.settings.stall_factor, self.settings.stall_floor_s)
        self.hung = asyncio.Event()
        self.hung_cause = ""

    def loops(self) -> tuple[Coroutine[None, None, None], ...]:
        """Return the periodic work, to be run until canceled."""
        lease_s = self.settings.lease_ms / 1000
        return (
            self._every(min(lease_s / 3, RENEW_EVERY_S), self._renew),
            self._every(lease_s / 8, self._reclaim),
            self._every(CHECK_DEADLINES_EVERY_S, self._stop_expired),
        )

    async def _renew(self) -> None:
        """Renew every lease; stop jobs that are lost, canceled or paused. If the GPU thread hangs, set `hung`."""
        status = self.engine.status()
        if stalled(status.activity, time.monotonic(), self._limits):
            self.hung_cause = status.failure or "the GPU thread made no progress"
            log.error("gpu_thread_hung", running=len(self.claimed_jobs), cause=self.hung_cause)
            self.hung.set()
            return
        claimed_jobs: dict[str, ClaimedJob] = {}
        for claimed in tuple(self.claimed_jobs.values()):  # in order of their claims
            if (older := claimed_jobs.get(claimed.job.id)) is not None:  # lost, and claimed again by this worker
                self._stop(older, StopReason.LOST)
            claimed_jobs[claimed.job.id] = claimed
        if not claimed_jobs:
            return
        epochs = {job_id: claimed.claim.epoch for job_id, claimed in claimed_jobs.items()}
        renewal = await self.queue.claims.renew(self.worker, epochs)
        for job_id in renewal.lost:
            self._stop(claimed_jobs[job_id], StopReason.LOST)
        for job_id in renewal.cancel:
            self._stop(claimed_jobs[job_id], StopReason.CANCELED)
        for job_id in renewal.pause:
            self._put_aside(claimed_jobs[job_id])

    async def _reclaim(self) -> None:
        """Requeue jobs whose lease expired, and end queued jobs that can no longer meet their deadline."""
        if reclaimed := await self.queue.maintenance.reclaim():
            metrics.leases_expired.inc(len(reclaimed))
            log.warning("leases_expired", jobs=reclaimed)
        await self.queue.maintenance.expire()

    async def _stop_expired(self) -> None:
        """Stop claimed jobs past their deadline."""
        now = time.monotonic()
        for claimed in tuple(self.claimed_jobs.values()):
            if claimed.deadline_at_s is not None and claimed.deadline_at_s <= now:
                self._stop(claimed, StopReason.EXPIRED)

    def _put_aside(self, claimed: ClaimedJob) -> None:
        """End a job in the engine, with a checkpoint if it can have one: its task then returns it to the queue.

        Asked again at each renewal: the engine does not know a job whose inputs are being fetched.
        """
        if claimed.stop_reason is None and not claimed.engine_done.done():
            end = self.engine.hand_over if claimed.has_checkpoints else self.engine.cancel
            end(claimed.claim_key)

    def _stop(self, claimed: ClaimedJob, reason: StopReason) -> None:
        if claimed.stop_reason is None:
            claimed.stop(reason)
            self.engine.cancel(claimed.claim_key)

    async def _every(self, period_s: float, action: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(random.uniform(0.7, 1.0) * period_s)
            try:
                await action()
            except RedisUnavailable as error:
                log.warning("lease_upkeep_failed", action=action.__name__.strip("_"), error=error.message)
