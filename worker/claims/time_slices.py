"""Time slices: a batch that has run for its model's `slice_s` gives way to overdue jobs of other models."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import structlog

from shared.errors import RedisUnavailable
from worker.claims.checkpoint_store import CheckpointStore
from worker.claims.claimed_job import ClaimedJob
from worker.claims.claiming import ClaimLoop
from worker.engine.protocol import EngineInterface

log = structlog.get_logger()

CHECK_EVERY_S = 0.5
ASK_AGAIN_S = 10.0
"""After a request for a checkpoint that has brought none, as of a job whose steps are still replayed."""


class Slice(NamedTuple):
    """How long a job has taken steps since its claim, and how long the rest of them takes; 0 if that is unknown."""

    ran_s: float
    left_s: float


def is_over(slice_s: float, jobs: Collection[Slice], cost_s: float) -> bool:
    """Return whether a batch is to be put aside for others; `cost_s`: of putting it aside and loading its model again.

    Each of its jobs has then run for a slice, and for no less than the cost, so that at most half of the time is lost
    to changes; and for one of them more is left than that.
    """
    if not jobs or not slice_s:
        return False
    return min(job.ran_s for job in jobs) >= max(slice_s, cost_s) and max(job.left_s for job in jobs) > cost_s


@dataclass(eq=False)
class TimeSlices:
    """Puts batches aside: the engine ends their jobs with checkpoints, and their tasks return them to the queue.

    Before, each job must have a checkpoint of its run in storage: quotas and outages refuse some, and a job that lost
    its steps at each slice would never end.
    """

    claim_loop: ClaimLoop
    engine: EngineInterface
    checkpoints: CheckpointStore
    claimed_jobs: Mapping[str, ClaimedJob]
    _asked: set[str] = field(default_factory=set)
    _requested_s: dict[str, float] = field(default_factory=dict)  # by claim key, when a checkpoint was requested

    async def watch(self) -> None:
        """Put batches aside until canceled."""
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            try:
                if (jobs := self._due()) and await self._others_wait(jobs) and self._all_keep_steps(jobs):
                    self._put_aside(jobs)
            except RedisUnavailable as error:
                log.warning("slices_not_checked", error=error.message)

    def _due(self) -> list[ClaimedJob]:
        """Return the jobs of a batch whose slice is over; none while jobs of other models run as well."""
        jobs = [one for one in self.claimed_jobs.values() if not one.engine_done.done()]
        self._asked &= self.claimed_jobs.keys()
        if self._asked.intersection(one.claim_key for one in jobs):  # their checkpoints are being taken
            return []
        if len({one.job.model for one in jobs}) != 1 or any(not _can_be_put_aside(one) for one in jobs):
            return []
        now_s, spec = time.monotonic(), jobs[0].spec
        cost_s = self.checkpoints.last_s + self.engine.status().load_seconds.get(spec.id, 0.0)
        slices = [Slice(one.ran_s(now_s), one.remaining_s(now_s)) for one in jobs]
        return jobs if is_over(spec.slice_s, slices, cost_s) else []

    async def _others_wait(self, jobs: Sequence[ClaimedJob]) -> bool:
        """Return whether jobs of other models, of no lower priority than these, are overdue for this worker."""
        priority = min((one.job.priority for one in jobs), key=lambda one: one.rank)
        return await self.claim_loop.others_are_overdue(jobs[0].job.model, priority)

    def _all_keep_steps(self, jobs: Sequence[ClaimedJob]) -> bool:
        """Return whether no job would lose its steps; of the others checkpoints are requested, once in a while."""
        now_s, waiting = time.monotonic(), [one.claim_key for one in jobs if not one.keeps_steps]
        self._requested_s = {key: at_s for key, at_s in self._requested_s.items() if key in self.claimed_jobs}
        keys = [key for key in waiting if now_s - self._requested_s.get(key, float("-inf")) >= ASK_AGAIN_S]
        if keys:
            self._requested_s.update(dict.fromkeys(keys, now_s))
            self.engine.take_checkpoints(*keys)
        return not waiting

    def _put_aside(self, jobs: Sequence[ClaimedJob]) -> None:
        running = [one for one in jobs if not one.engine_done.done()]
        if running:
            self._asked.update(one.claim_key for one in running)
            log.info("batch_put_aside", model=running[0].job.model, jobs=len(running))
            self.engine.hand_over(*(one.claim_key for one in running))
            self.claim_loop.put_aside(running)


def _can_be_put_aside(claimed: ClaimedJob) -> bool:
    """Return whether a job loses no step; a lost one, which runs solo, keeps its worker."""
    return claimed.has_checkpoints and claimed.stop_reason is None and not claimed.claim.must_run_solo
