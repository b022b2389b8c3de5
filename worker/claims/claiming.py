"""The worker's claim loop: claims jobs while it has free slots, and waits for wake-ups; `claim_policy` decides."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from shared.config.catalog import Catalog
from shared.config.settings import Settings
from shared.errors import RedisUnavailable
from shared.job_fields import Priority
from shared.queue import Claim, Queue
from shared.queue.script_arguments import Models
from shared.queue.workers.wakeups import WaitingList
from shared.runtime.asyncio_tools import retry_while_unavailable
from worker.claims.claim_policy import (
    MAX_FLEET_PAUSE_S,
    MAX_PAUSE_S,
    ClaimRequest,
    InteractiveHint,
    Listing,
    RunningJob,
    Wait,
    claim_requests,
    emptied_signature,
    likely_requests,
    load_times_ms,
    longest_pause_s,
    preempted_tenants,
    running_signature,
)
from worker.claims.claimed_job import ClaimedJob
from worker.cost_curves import CostCurves
from worker.engine.engine_status import allowed_rows
from worker.engine.protocol import EngineInterface
from worker.metrics.batch_log import BatchLog
from worker.model_availability import ModelAvailability
from worker.output.upload import Uploader

ORDER_PAUSE_S = 0.5  # while an operator's order, or a change of the models file, waits for running jobs


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
        self.claiming = asyncio.Lock()  # held from the request of claims until their jobs are in `claimed_jobs`
        self._hint = InteractiveHint()
        self._pause_ended = asyncio.Event()
        self._stopped = False
        self._wakeups = 0
        self._unused_wakeups: list[str] = []
        self._emptied: str | None = None
        self._woken_for_interactive = False
        self._fruitless = 0
        self._wait: Wait | None = None
        self._aside: Sequence[ClaimedJob] = ()

    @property
    def _max_batch(self) -> int:
        return max(spec.max_batch for spec in self.catalog)

    def stop(self) -> None:
        self._stopped = True
        self.end_pause()

    async def others_are_overdue(self, model: str, min_priority: Priority) -> bool:
        """Return whether jobs of other models, of at least that priority, are overdue that this worker would claim."""
        others = self._without({model})
        return bool(others) and await self.queue.claims.has_overdue(self.worker, others, min_priority, self._max_batch)

    def put_aside(self, jobs: Sequence[ClaimedJob]) -> None:
        """Claim nothing until the engine has ended these jobs, and then jobs of other models before theirs."""
        self._aside = jobs
        self.end_pause()

    def end_pause(self) -> None:
        """End the current pause: slots may be free, or jobs queued."""
        self._pause_ended.set()

    async def run(self) -> None:
        """Claim until `stop`, or until the queue has a job of a newer version, which this worker can only release."""
        try:
            while not (self._stopped or self.queue.claims.outdated):
                self._pause_ended.clear()
                async with self.claiming:
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
                wakeup = await self.queue.wakeups.wait(self.worker, MAX_PAUSE_S)
            except RedisUnavailable:
                await asyncio.sleep(random.uniform(0.5, 1.0))
                continue
            if wakeup is None:
                continue
            self._unused_wakeups.append(wakeup)
            self._wakeups += 1
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
            await self.queue.wakeups.stop_waiting(self.worker, unused=self._unused_wakeups)
            self._unused_wakeups.clear()

    async def _claim(self) -> tuple[list[Claim], float]:
        """Return new claims, or how long to pause when there are none, in seconds."""
        wanted, wakeups = self._requests(), self._wakeups
        if self._wait and (left_s := self._wait.left_s(self._listing(wanted), wakeups, time.monotonic())):
            return [], left_s
        self._wait = None  # a claim takes this worker off the lists
        emptied, self._emptied = self._emptied, None
        requests = likely_requests(wanted, interactive=self._hint.likely, emptied=emptied)
        for request in requests:
            if claims := await self._send(request):
                self._emptied = emptied_signature(request, [claim.job.slots for claim in claims])
                return claims, 0.0
        return [], await self._prepare_pause(wanted, requests, wakeups)

    def _requests(self) -> list[ClaimRequest]:
        """Return what this worker has room for: nothing next to a lost job, while the spool is full, or while an
        operator's order or a batch that is put aside waits for the running jobs."""
        if (
            self.uploader.full
            or self.engine.status().awaits_jobs
            or any(one.has_checkpoints and not one.engine_done.done() for one in self._aside)
            or any(claimed.claim.must_run_solo for claimed in self.claimed_jobs.values())
        ):
            return []
        claimed_jobs = [claimed for claimed in self.claimed_jobs.values() if claimed.occupies_slots]
        running = [
            RunningJob(one.claim.signature, one.slots, one.job.priority is Priority.INTERACTIVE) for one in claimed_jobs
        ]
        batch_slots = self._max_batch
        if running:
            signature = running_signature(running)
            first = next(claimed for claimed in claimed_jobs if claimed.claim.signature == signature)
            if first.job.model in self.availability.retiring:
                return []
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
                capacity=self._max_batch,
                on_overdue=mark_overdue,
            )
        if min_priority is Priority.BULK:
            return await self._claim_any(slots)
        # Only models in memory: a model cannot be loaded next to one whose jobs are preempted.
        loaded = self._loaded()
        return await claims.claim(
            self.worker, loaded, slots, min_priority=min_priority, has_other_jobs=True, preempted=preempted
        )

    async def _claim_any(self, slots: int) -> list[Claim]:
        """Claim jobs of any model; after a batch was put aside, those of other models first, for which it was."""
        others = self._without({one.job.model for one in self._aside}) if self._aside else {}
        found = await self.queue.claims.claim(self.worker, others, slots) if others else []
        self._aside = ()
        return found or await self.queue.claims.claim(self.worker, self._load_times(), slots)

    def _without(self, models: Collection[str]) -> dict[str, int]:
        return {model: load_ms for model, load_ms in self._load_times().items() if model not in models}

    def _loaded(self) -> tuple[str, ...]:
        return tuple(one for one in self.engine.status().loaded_models if one not in self.availability.retiring)

    def _load_times(self) -> dict[str, int]:
        status = self.engine.status()
        models = self.availability.claimable()
        return load_times_ms(models, status.loaded_models, status.load_seconds, status.unavailable_models)

    async def _prepare_pause(
        self, wanted: Sequence[ClaimRequest], requests: Sequence[ClaimRequest], wakeups: int
    ) -> float:
        """List this worker as waiting for `wanted`; return for how long to pause, in seconds.

        `requests` are those of `wanted` that were sent and returned no jobs, after so many `wakeups`.
        """
        sent_own = any(one.signature is not None and one.min_priority is Priority.BULK for one in requests)
        had_wakeup = bool(self._unused_wakeups) or self._woken_for_interactive
        self._woken_for_interactive = False
        listing = self._listing(wanted)
        waiting = await self._list_as_waiting(listing)
        ready_in_ms, interactive_in_ms = 0 if waiting.is_queued else None, None
        if waiting.is_queued and not sent_own:  # since the last join
            self.end_pause()
        if any(one.signature is None and one.min_priority is Priority.BULK for one in wanted):
            ready_in_ms = await self.queue.claims.next_ready_ms(self._load_times(), worker=self.worker)
        elif any(request.min_priority is Priority.INTERACTIVE for request in requests):
            interactive_in_ms = await self._interactive_in_ms()
            if interactive_in_ms is not None and any(request.signature is None for request in requests):
                ready_in_ms = min(interactive_in_ms, interactive_in_ms if ready_in_ms is None else ready_in_ms)
        elif waiting.has_interactive:
            interactive_in_ms = 0
            self._woken_for_interactive = had_wakeup  # the next attempt is the one for this wake-up
            self._hint.set()
            self.end_pause()
        # A worker with a wake-up for jobs claims them when they are ready; the others do so later, if it has not.
        delay_s = 0.0 if had_wakeup or waiting.workers <= 1 else random.uniform(0.1, 1.0)
        longest_s = longest_pause_s(ready_in_ms, waiting.workers, self._fruitless, delay_s)
        if self.engine.status().awaits_jobs or self.availability.retiring:
            longest_s = min(longest_s, ORDER_PAUSE_S)
        pause_s = longest_s * (1.0 if ready_in_ms and had_wakeup else random.uniform(0.75, 1.0))
        none_queued = ready_in_ms is None and interactive_in_ms is None
        self._wait = Wait(listing, wakeups, time.monotonic() + pause_s) if none_queued else None
        return pause_s

    async def _interactive_in_ms(self) -> int | None:
        """Return ms until interactive jobs of the loaded models are ready, None without one."""
        seen, loaded = self._hint.count, self._loaded()
        ready_in_ms = await self.queue.claims.next_ready_ms(loaded, min_priority=Priority.INTERACTIVE)
        if ready_in_ms is None:
            self._hint.clear(seen)
        return ready_in_ms

    def _listing(self, wanted: Sequence[ClaimRequest]) -> Listing:
        idle = any(one.signature is None and one.min_priority is Priority.BULK for one in wanted)
        interactive = any(one.min_priority is Priority.INTERACTIVE for one in wanted)
        signature = next((one.signature for one in wanted if one.min_priority is Priority.BULK), None)
        models: Models = self._load_times() if idle else self._loaded() if interactive else ()
        return Listing(signature, idle, models)

    async def _list_as_waiting(self, listing: Listing) -> WaitingList:
        """List this worker as waiting, and pass on the wake-ups that it could not use, but those for jobs to come."""
        unused = tuple(self._unused_wakeups)
        result = await self.queue.wakeups.list_as_waiting(
            self.worker,
            listing.models,
            wait_s=MAX_FLEET_PAUSE_S + 5.0,
            signature=listing.signature,
            idle=listing.idle,
            unused=unused,
        )
        self._unused_wakeups[: len(unused)] = result.kept
        return result
