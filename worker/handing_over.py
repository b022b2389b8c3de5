"""The end of a drain: what can be finished is, and the rest goes on elsewhere from its checkpoints."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import structlog

from worker.claims.claimed_job import ClaimedJob
from worker.engine.protocol import EngineInterface

log = structlog.get_logger()

CHECK_EVERY_S = 0.2
LAST_S = 5.0  # after the drain timeout, for the checkpoints of jobs that did not seem to exceed it


@dataclass(eq=False)
class HandingOver:
    """Hands jobs over: the engine ends each with a checkpoint, and its task returns it to the queue.

    A job without a checkpoint runs on until the drain timeout.
    """

    engine: EngineInterface
    claimed_jobs: dict[str, ClaimedJob]  # by claim key
    tasks: set[asyncio.Task[None]]
    _asked: set[str] = field(default_factory=set)

    async def finish_jobs(self, timeout_s: float) -> None:
        """Wait until no job is left, up to a little more than `timeout_s`; hand over those that take longer than it."""
        until_s = time.monotonic() + timeout_s
        while self.tasks and (left_s := until_s - time.monotonic()) > 0:
            now_s = time.monotonic()
            self._ask([one for one in self.claimed_jobs.values() if one.remaining_s(now_s) > left_s])
            await asyncio.wait(set(self.tasks), timeout=min(left_s, CHECK_EVERY_S))
        self._ask(list(self.claimed_jobs.values()))
        give_up_s = time.monotonic() + LAST_S
        while self._awaits_checkpoints() and (left_s := give_up_s - time.monotonic()) > 0:
            await asyncio.wait(set(self.tasks), timeout=min(left_s, CHECK_EVERY_S))

    def _ask(self, jobs: list[ClaimedJob]) -> None:
        keys = [one.claim_key for one in jobs if one.claim_key not in self._asked and not one.engine_done.done()]
        if keys:
            self._asked.update(keys)
            log.info("jobs_handed_over", jobs=len(keys))
            self.engine.hand_over(*keys)

    def _awaits_checkpoints(self) -> bool:
        return any(one.claim_key in self._asked and one.has_checkpoints for one in self.claimed_jobs.values())
