"""The worker's claim loop: what to claim, and when. Pure functions decide."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from shared.config.models_file import Catalog
from shared.config.settings import Settings
from shared.errors import RedisUnavailable
from shared.job import Job, Priority
from shared.queue import Claim, Queue
from shared.queue.claims import Models
from shared.runtime.asyncio_tools import retry_while_unavailable
from worker.batch_log import BatchLog
from worker.cost_curves import CostCurves
from worker.engine.protocol import EngineInterface, allowed_rows
from worker.job_runner import ClaimedJob
from worker.model_availability import ModelAvailability
from worker.output.upload import Uploader

MAX_PAUSE_S = 2.0
MIN_PAUSE_S = 0.05
MAX_BACKOFF_S = 1.0
PAUSE_PER_WORKER_S = 0.5
MAX_FLEET_PAUSE_S = 30.0
UNKNOWN_LOAD_S = 10.0
MAX_LOAD_S = 60.0
FAILED_LOAD_MS = -round(1000 * MAX_LOAD_S)
HINT_TTL_S = 2.0
ORDER_PAUSE_S = 0.5  # while an operator's order waits for running jobs


@dataclass(eq=False)
class ClaimLoop:
    """Claims jobs for the free slots of `worker`; each claim is passed to `on_claim`."""

    worker: str
    queue: Queue
    engine: EngineInterface
    availability: ModelAvailability
    catalog: Catalog
    settings: Settings
    claimed_jobs: Mapping[str, ClaimedJob]
    uploader: Uploader
    batch_log: BatchLog
    cost_curves: CostCurves
    on_claim: Callable[[Claim], None]

    def __post_init__(self) -> None:
        self._max_batch = max(spec.max_batch for spec in self.catalog)
        self._hint = InteractiveHint()
        self._pause_ended = asyncio.Event()
        self._stopped = False
        self._unused_wakeups: list[str] = []
        self._fruitless = 0

    def stop(self) -> None:
        self._stopped = True
        self.end_pause()

    def end_pause(self) -> None:
        """End the current pause: slots may be free, or jobs queued."""
        self._pause_ended.set()

    async def run(self) -> None:
        """Claim until `stop`, or until the queue has a job of a newer version, which this worker can only release."""
        try:
            while not (self._stopped or self.queue.claims.outdated):
                self._pause_ended.clear()
                result = await retry_while_unavailable(self._claim, "claim_failed", until=lambda: self._stopped)
                if result is None:
                    return
                claims, pause_s = result
                for claim in claims:
                    self.on_claim(claim)
                ended_early = not pause_s or (not self.queue.claims.outdated and await self._pause(pause_s))
                self._fruitless = 0 if ended_early else self._fruitless + 1
        finally:
            await self._stop_waiting()

    async def listen(self) -> None:
        """Collect this worker's wake-ups; each ends the pause."""
        while True:
            try:
                wakeup = await self.queue.claims.wait_wakeup(self.worker, MAX_PAUSE_S)
            except RedisUnavailable:
                await asyncio.sleep(random.uniform(0.5, 1.0))
                continue
            if wakeup is None:
                continue
            self._unused_wakeups.append(wakeup)
            self._hint.set()
            self.end_pause()
            if self._stopped:
                await self._stop_waiting()

    async def _pause(self, pause_s: float) -> bool:
        """Pause; return whether `end_pause` was called."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._pause_ended.wait()
        return self._pause_ended.is_set()

    async def _stop_waiting(self) -> None:
        """Take this worker off the list of waiting ones, and pass its unused wake-ups on."""
        with contextlib.suppress(RedisUnavailable):
            await self.queue.claims.stop_waiting(self.worker, unused=self._unused_wakeups)
            self._unused_wakeups.clear()

    async def _claim(self) -> tuple[list[Claim], float]:
        """Return new claims, or how long to pause when there are none, in seconds."""
        wanted = self._requests()
        # Interactive jobs only while some can be queued.
        likely = self._hint.likely
        requests = [one for one in wanted if likely or one.min_priority is not Priority.INTERACTIVE]
        for request in requests:
            if claims := await self._send(request):
                return claims, 0.0
        return [], await self._prepare_pause(wanted, requests)

    def _requests(self) -> list[ClaimRequest]:
        """Return what this worker has room for: nothing next to a lost job, while the spool is full, or while an
        operator's order waits for the running jobs."""
        if (
            self.uploader.full
            or self.engine.status().awaits_jobs
            or any(claimed.claim.must_run_solo for claimed in self.claimed_jobs.values())
        ):
            return []
        claimed_jobs = [claimed for claimed in self.claimed_jobs.values() if claimed.occupies_slots]
        claims = [claimed.claim for claimed in claimed_jobs]
        running = [RunningJob(c.signature, c.job.slots, c.job.priority is Priority.INTERACTIVE) for c in claims]
        batch_slots = self._max_batch
        if running:
            signature = running_signature(running)
            first = next(claimed for claimed in claimed_jobs if claimed.claim.signature == signature)
            memory_slots = allowed_rows(self.engine.status(), first.job, first.spec.max_batch)
            batch_slots = self.cost_curves.rows(signature, memory_slots)
            self.batch_log.set_limits(signature, memory_slots, batch_slots)
        limit = self.settings.max_preempted_rows
        return claim_requests(running, batch_slots, self._max_batch, batch_slots if limit is None else limit)

    async def _send(self, request: ClaimRequest) -> list[Claim]:
        claims, slots, min_priority = self.queue.claims, request.slots, request.min_priority
        running = (claimed.claim.job for claimed in self.claimed_jobs.values() if claimed.occupies_slots)
        preempted = preempted_tenants(running, min_priority)
        if request.signature is not None:
            models, mark_overdue = self._load_times(), self.batch_log.mark_overdue
            return await claims.join(
                self.worker,
                request.signature,
                slots,
                models=models,
                min_priority=min_priority,
                preempted=preempted,
                on_overdue=mark_overdue,
            )
        if min_priority is Priority.BULK:
            return await claims.claim(self.worker, self._load_times(), slots)
        # Only models in memory: a model cannot be loaded next to one whose jobs are preempted.
        loaded = self.engine.status().loaded_models
        return await claims.claim(
            self.worker, loaded, slots, min_priority=min_priority, has_other_jobs=True, preempted=preempted
        )

    def _load_times(self) -> dict[str, int]:
        status = self.engine.status()
        models = self.availability.claimable()
        return load_times_ms(models, status.loaded_models, status.load_seconds, status.unavailable_models)

    async def _prepare_pause(self, wanted: Sequence[ClaimRequest], requests: Sequence[ClaimRequest]) -> float:
        """List this worker as waiting for `wanted`; return for how long to pause, in seconds.

        `requests` are those of `wanted` that were sent and returned no jobs.
        """
        had_wakeup = bool(self._unused_wakeups)
        waiting, queued = await self._list_as_waiting(wanted)
        ready_in_ms = 0 if queued else None
        if any(one.signature is None and one.min_priority is Priority.BULK for one in wanted):
            ready_in_ms = await self.queue.claims.next_ready_ms(self._load_times(), worker=self.worker)
        elif any(request.min_priority is Priority.INTERACTIVE for request in requests):
            seen = self._hint.count
            loaded = self.engine.status().loaded_models
            interactive_in_ms = await self.queue.claims.next_ready_ms(loaded, min_priority=Priority.INTERACTIVE)
            if interactive_in_ms is None:
                self._hint.clear(seen)
            elif any(request.signature is None for request in requests):
                ready_in_ms = min(interactive_in_ms, interactive_in_ms if ready_in_ms is None else ready_in_ms)
        # A worker with a wake-up for jobs claims them when they are ready; the others do so later, if it has not.
        delay_s = 0.0 if had_wakeup or waiting <= 1 else random.uniform(0.1, 1.0)
        longest_s = longest_pause_s(ready_in_ms, waiting, self._fruitless, delay_s)
        if self.engine.status().awaits_jobs:
            longest_s = min(longest_s, ORDER_PAUSE_S)
        return longest_s * (1.0 if ready_in_ms and had_wakeup else random.uniform(0.75, 1.0))

    async def _list_as_waiting(self, wanted: Sequence[ClaimRequest]) -> tuple[int, bool]:
        """List this worker as waiting for `wanted`, and pass on the wake-ups that it could not use."""
        idle = any(one.signature is None and one.min_priority is Priority.BULK for one in wanted)
        interactive = any(one.min_priority is Priority.INTERACTIVE for one in wanted)
        signature = next((one.signature for one in wanted if one.min_priority is Priority.BULK), None)
        models: Models = self._load_times() if idle else self.engine.status().loaded_models if interactive else ()
        unused = tuple(self._unused_wakeups)
        result = await self.queue.claims.list_as_waiting(
            self.worker, models, wait_s=MAX_FLEET_PAUSE_S + 5.0, signature=signature, idle=idle, unused=unused
        )
        del self._unused_wakeups[: len(unused)]
        return result


def longest_pause_s(ready_in_ms: int | None, waiting: int, fruitless: int, delay_s: float = 0.0) -> float:
    """Return for how long a worker without a wake-up pauses before it tries to claim again, at most.

    `waiting` workers together try about twice a second, so that each job that a lost wake-up leaves is found within
    `MAX_PAUSE_S`. `ready_in_ms`: until jobs are ready, None without queued ones. Where they are ready and were not
    claimed, `fruitless` times since the last wake-up, another worker was faster, or they cannot run now.
    """
    share_s = min(PAUSE_PER_WORKER_S * waiting, MAX_FLEET_PAUSE_S)
    longest_s = max(MAX_PAUSE_S, share_s)
    if ready_in_ms is None:
        return longest_s
    if ready_in_ms > 0:
        return min(ready_in_ms / 1000 + delay_s, longest_s)
    return min(MIN_PAUSE_S * max(1, waiting) * 2.0 ** min(fruitless, 16), max(MAX_BACKOFF_S, share_s))


@dataclass(frozen=True)
class RunningJob:
    """A job that occupies slots of this worker."""

    signature: str
    slots: int
    interactive: bool = False


@dataclass(frozen=True)
class ClaimRequest:
    """Up to `slots` slots of `signature`, or of any ready signature where that is None."""

    signature: str | None
    slots: int
    min_priority: Priority = Priority.BULK


def running_signature(running: Sequence[RunningJob]) -> str:
    """Return the signature that the engine runs now; others are preempted. `running` is in order of arrival."""
    return next((job for job in running if job.interactive), running[0]).signature


def claim_requests(
    running: Sequence[RunningJob], batch_slots: int, max_batch: int, max_preempted: int
) -> list[ClaimRequest]:
    """Return what to claim, in order: the first request that returns jobs ends the attempt.

    `batch_slots` of the running signature fit into a forward; `max_batch` is the largest batch of any signature.

    - While all jobs are of one signature, its free slots are open to all priorities.
    - Interactive jobs of the running signature may use each slot of a forward that no interactive job holds: free slots
      first, then those of other jobs, of which they preempt up to `max_preempted`.
    - Interactive jobs of another signature are claimed while none runs and at most `max_preempted` slots are in use.
    """
    if not running:
        return [ClaimRequest(None, max_batch)]
    signature = running_signature(running)
    used = sum(job.slots for job in running)
    own = sum(job.slots for job in running if job.signature == signature)
    interactive = sum(job.slots for job in running if job.interactive)
    requests = []
    if used == own < batch_slots:
        requests.append(ClaimRequest(signature, batch_slots - used))
    free, with_preemption = batch_slots - own, batch_slots + max_preempted - used
    if (slots := min(batch_slots - interactive, max(free, with_preemption))) > 0:
        requests.append(ClaimRequest(signature, slots, Priority.INTERACTIVE))
    if not interactive and used <= max_preempted:
        requests.append(ClaimRequest(None, max_batch, Priority.INTERACTIVE))
    return requests


def preempted_tenants(running: Iterable[Job], min_priority: Priority) -> set[str]:
    """Return the tenants of the running jobs that claimed ones would preempt: only interactive jobs preempt others."""
    if min_priority is not Priority.INTERACTIVE:
        return set()
    return {job.tenant for job in running if job.priority is not Priority.INTERACTIVE}


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
