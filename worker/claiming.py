"""The worker's claim loop: what to claim, and when. Pure functions decide."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from shared.config.models_file import Catalog
from shared.config.settings import Settings
from shared.errors import RedisUnavailable
from shared.job import Priority
from shared.queue import Claim, Queue
from shared.runtime.asyncio_tools import retry_while_unavailable
from worker.batch_log import BatchLog
from worker.cost_curves import CostCurves
from worker.engine.protocol import EngineInterface, allowed_rows
from worker.job_runner import ClaimedJob
from worker.output.upload import Uploader

MAX_PAUSE_S = 2.0
MIN_PAUSE_S = 0.05
UNKNOWN_LOAD_S = 10.0
MAX_LOAD_S = 60.0
FAILED_LOAD_MS = -round(1000 * MAX_LOAD_S)
HINT_TTL_S = 2.0


@dataclass(eq=False)
class ClaimLoop:
    """Claims jobs for the free slots of `worker`; each claim is passed to `on_claim`."""

    worker: str
    queue: Queue
    engine: EngineInterface
    catalog: Catalog
    settings: Settings
    claimed_jobs: Mapping[str, ClaimedJob]
    uploader: Uploader
    batch_log: BatchLog
    cost_curves: CostCurves
    on_claim: Callable[[Claim], None]

    def __post_init__(self) -> None:
        self._models = [spec.id for spec in self.catalog]
        self._max_batch = max(spec.max_batch for spec in self.catalog)
        self._hint = InteractiveHint()
        self._wakeup = asyncio.Event()
        self._stopped = False

    def stop(self) -> None:
        self._stopped = True
        self.wake()

    def wake(self) -> None:
        """End the current pause: slots may be free, or jobs queued."""
        self._wakeup.set()

    async def run(self) -> None:
        """Claim until `stop`, or until the queue has a job of a newer version, which this worker can only release."""
        while not (self._stopped or self.queue.claims.outdated):
            self._wakeup.clear()
            result = await retry_while_unavailable(self._claim, "claim_failed", until=lambda: self._stopped)
            if result is None:
                return
            claims, pause_s = result
            for claim in claims:
                self.on_claim(claim)
            if pause_s and not self.queue.claims.outdated:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._wakeup.wait()

    async def listen(self) -> None:
        """Wake the loop whenever Redis reports new jobs."""
        while True:
            try:
                priority = await self.queue.claims.wait_wakeup(MAX_PAUSE_S)
            except RedisUnavailable:
                await asyncio.sleep(random.uniform(0.5, 1.0))
                continue
            if priority in (None, Priority.INTERACTIVE):
                self._hint.set()
            self.wake()

    async def _claim(self) -> tuple[list[Claim], float]:
        """Return new claims, or how long to pause when there are none, in seconds."""
        requests = self._requests()
        for request in requests:
            if claims := await self._send(request):
                return claims, 0.0
        return [], await self._pause_s(requests)

    def _requests(self) -> list[ClaimRequest]:
        """Return what to claim now; interactive jobs only while some can be queued."""
        if self.uploader.full:
            return []
        claimed_jobs = [claimed for claimed in self.claimed_jobs.values() if claimed.occupies_slots]
        claims = [claimed.claim for claimed in claimed_jobs]
        running = [RunningJob(c.signature, c.job.slots, c.job.priority is Priority.INTERACTIVE, c.solo) for c in claims]
        rows = self._max_batch
        if running:
            signature = leading_signature(running)
            leader = next(claimed for claimed in claimed_jobs if claimed.claim.signature == signature)
            memory_rows = allowed_rows(self.engine.status(), leader.job, leader.spec.max_batch)
            rows = self.cost_curves.rows(signature, memory_rows)
            self.batch_log.set_limits(signature, memory_rows, rows)
        limit = self.settings.max_preempted_rows
        requests = claim_requests(running, rows, self._max_batch, rows if limit is None else limit)
        if self._hint.likely:
            return requests
        return [request for request in requests if request.min_priority is not Priority.INTERACTIVE]

    async def _send(self, request: ClaimRequest) -> list[Claim]:
        claims, slots, min_priority = self.queue.claims, request.slots, request.min_priority
        if request.signature is not None:
            models, mark_overdue = self._load_times(), self.batch_log.mark_overdue
            return await claims.join(
                self.worker, request.signature, slots, models=models, min_priority=min_priority, on_overdue=mark_overdue
            )
        if min_priority is Priority.BULK:
            return await claims.claim(self.worker, self._load_times(), slots)
        # Only models in memory: a model cannot be loaded next to one whose jobs are preempted.
        loaded = self.engine.status().loaded_models
        return await claims.claim(self.worker, loaded, slots, min_priority=min_priority, has_other_jobs=True)

    def _load_times(self) -> dict[str, int]:
        status = self.engine.status()
        return load_times_ms(self._models, status.loaded_models, status.load_seconds, status.unavailable_models)

    async def _pause_s(self, requests: Sequence[ClaimRequest]) -> float:
        """Return how long to pause after `requests` returned no jobs: until a signature is ready."""
        ready_in_ms = None
        if not any(claimed.occupies_slots for claimed in self.claimed_jobs.values()):
            ready_in_ms = await self.queue.claims.next_ready_ms(self._load_times(), worker=self.worker)
        elif any(request.min_priority is Priority.INTERACTIVE for request in requests):
            seen = self._hint.count
            loaded = self.engine.status().loaded_models
            interactive_in_ms = await self.queue.claims.next_ready_ms(loaded, min_priority=Priority.INTERACTIVE)
            if interactive_in_ms is None:
                self._hint.clear(seen)
            if any(request.signature is None for request in requests):
                ready_in_ms = interactive_in_ms
        if ready_in_ms is None:
            return MAX_PAUSE_S
        # Ready and not claimed: another worker was faster, or the job needs more slots than are free.
        return MIN_PAUSE_S if ready_in_ms <= 0 else min(ready_in_ms / 1000, MAX_PAUSE_S)


@dataclass(frozen=True)
class RunningJob:
    """A job that occupies slots of this worker."""

    signature: str
    slots: int
    interactive: bool = False
    solo: bool = False


@dataclass(frozen=True)
class ClaimRequest:
    """Up to `slots` slots of `signature`, or of any ready signature where that is None."""

    signature: str | None
    slots: int
    min_priority: Priority = Priority.BULK


def leading_signature(running: Sequence[RunningJob]) -> str:
    """Return the signature that the engine runs now; others are preempted. `running` is in order of arrival."""
    return next((job for job in running if job.interactive), running[0]).signature


def claim_requests(running: Sequence[RunningJob], rows: int, max_batch: int, max_preempted: int) -> list[ClaimRequest]:
    """Return what to claim, in order: the first request that returns jobs ends the attempt.

    `rows` of the leading signature run together; `max_batch` is the largest batch of any signature. While all jobs run
    together, free slots are open to all priorities. Beyond them there is room for interactive jobs: of the leading
    signature until they fill a forward, of another signature while no interactive job runs. They preempt at most
    `max_preempted` rows. A solo job gets no batch mates.
    """
    if not running:
        return [ClaimRequest(None, max_batch)]
    if any(job.solo for job in running):
        return []
    leading = leading_signature(running)
    total = sum(job.slots for job in running)
    together = sum(job.slots for job in running if job.signature == leading)
    interactive = sum(job.slots for job in running if job.interactive)
    requests = []
    if total == together < rows:
        requests.append(ClaimRequest(leading, rows - total))
    # Interactive jobs can take the rows of a forward that none of them holds: free ones, or preempted ones.
    free, preemptable = rows - together, rows + max_preempted - total
    if (room := min(rows - interactive, max(free, preemptable))) > 0:
        requests.append(ClaimRequest(leading, room, Priority.INTERACTIVE))
    if not interactive and total <= max_preempted:
        requests.append(ClaimRequest(None, max_batch, Priority.INTERACTIVE))
    return requests


def load_times_ms(
    models: Sequence[str], loaded: Collection[str], measured_s: Mapping[str, float], failed: Collection[str] = ()
) -> dict[str, int]:
    """Return the load time of each model in ms: 0 for a loaded one, `FAILED_LOAD_MS` if its last load failed.

    A model never loaded here counts as the mean of the measured ones, or `UNKNOWN_LOAD_S`. Times are capped at
    `MAX_LOAD_S`, since jobs wait for as long as some loads take. `FAILED_LOAD_MS` ranks like the cap, so that a
    worker that can load the model gets its jobs.
    """
    unknown_s = sum(measured_s.values()) / len(measured_s) if measured_s else UNKNOWN_LOAD_S
    seconds = {model: min(MAX_LOAD_S, measured_s.get(model, unknown_s)) for model in models}
    times = {model: 0 if model in loaded else max(1, round(1000 * seconds[model])) for model in models}
    return times | {model: FAILED_LOAD_MS for model in models if model in failed and times[model]}


class InteractiveHint:
    """Cached hint whether interactive jobs can be queued. Saves a full worker most of its requests to Redis.

    Set by wake-ups; cleared when the queue has none, for `HINT_TTL_S` only: a wake-up can be missed, or a model
    loaded in the meantime.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._cleared_at = float("-inf")
        self.count = 0

    @property
    def likely(self) -> bool:
        return self._clock() - self._cleared_at >= HINT_TTL_S

    def set(self) -> None:
        self.count += 1
        self._cleared_at = float("-inf")

    def clear(self, seen: int) -> None:
        """Record that the queue had none, unless a hint came after the `seen` ones known at the request."""
        if seen == self.count:
            self._cleared_at = self._clock()
