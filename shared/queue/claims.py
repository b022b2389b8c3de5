"""Claims: a worker's side of the queue, from claiming jobs to settling them."""

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeAlias

import structlog
from pydantic import ValidationError

from shared.errors import RedisUnavailable
from shared.job import Failure, Job, Outcome, Priority, State, decode, is_newer
from shared.queue.client import MAX_BLOCK_MS, QueueClient, QueueComponent, translated
from shared.queue.records import ARTIFACTS, RANKS, Claim, ProgressReport, Renewal
from shared.queue.scripts import ClaimRow

log = structlog.get_logger()

Models: TypeAlias = Sequence[str] | Mapping[str, int]
"""Models of a worker, or a mapping to the ms of loading each: 0 in memory, negative when the last load failed.

Loaded models are claimed first. A model that only another worker holds is left to that worker for about one load."""

WAKEUPS_KEPT = 16
"""Length of the wake-up stream, as trimmed in `lib/queue.lua`."""


class Claims(QueueComponent):
    def __init__(self, client: QueueClient) -> None:
        super().__init__(client)
        self.outdated = False
        """Set when a job of a newer version was claimed: this worker must stop, so that a newer one runs it."""
        self.unfinished: set[asyncio.Future[None]] = set()
        """Releases of canceled claims; `close` waits for them."""
        self._wakeup_id: str | None = None

    async def claim(
        self,
        worker: str,
        models: Models,
        slots: int,
        *,
        min_priority: Priority = Priority.BULK,
        has_other_jobs: bool = False,
    ) -> list[Claim]:
        """Start a batch: claim jobs of one ready signature of `models`, up to `slots` slots and down to `min_priority`.

        A lost job is claimed solo (`Claim.solo`), and never by a worker that has other jobs.
        """
        if slots < 1 or not models:
            return []
        reply = self._scripts.claim(worker, slots, RANKS.index(min_priority), has_other_jobs, *_load_times(models))
        return await self._claimed(worker, reply) or []

    async def join(
        self,
        worker: str,
        signature: str,
        slots: int,
        *,
        models: Models = (),
        min_priority: Priority = Priority.BULK,
        on_overdue: Callable[[str], None] = lambda _signature: None,
    ) -> list[Claim]:
        """Claim more jobs of a running batch's signature, ready or not; never a job that must run solo.

        While another signature of `models` is overdue, only jobs of a higher priority than its own are claimed;
        `on_overdue` is called when that leaves none.
        """
        if slots < 1:
            return []
        reply = self._scripts.join(worker, signature, slots, RANKS.index(min_priority), *_load_times(models))
        claims = await self._claimed(worker, reply)
        if claims is None:
            on_overdue(signature)
        return claims or []

    async def _claimed(self, worker: str, reply: Coroutine[Any, Any, list[ClaimRow] | None]) -> list[Claim] | None:
        # Canceling the reply could leave claimed jobs without a worker until their leases end. So it completes in any
        # case, and the claims of a canceled call are released.
        task = asyncio.create_task(reply)
        try:
            rows = await asyncio.shield(task)
        except asyncio.CancelledError:
            releasing = asyncio.ensure_future(self._release_claimed(worker, task))
            self.unfinished.add(releasing)
            releasing.add_done_callback(self.unfinished.discard)
            raise
        if rows is None:
            return None
        jobs = [(row, await self._decoded(worker, row)) for row in rows]
        return [Claim(job, row[2], row[3], row[3], bool(row[4]), row[5]) for row, job in jobs if job is not None]

    async def _release_claimed(self, worker: str, claimed: asyncio.Future[list[ClaimRow] | None]) -> None:
        try:
            rows = await claimed
            await self.release(worker, {row[0]: row[3] for row in rows or ()})
        except RedisUnavailable as error:
            log.warning("claims_not_released", worker=worker, reason=error.message)

    async def _decoded(self, worker: str, row: ClaimRow) -> Job | None:
        job_id, wire, _, epoch, _, _ = row
        try:
            return decode(wire)
        except ValidationError as error:
            if is_newer(wire):
                self.outdated = True
                await self.release(worker, {job_id: epoch})
                log.error("job_of_newer_version", job_id=job_id, remedy="upgrade this worker; the job is released")
                return None
            log.error("job_undecodable", job_id=job_id, faults=error.error_count())
            failure = Failure(code="undecodable", message="this version cannot read the job's record")
            if await self.settle(worker, job_id, epoch, Outcome(state=State.FAILED, error=failure)):
                await self._scripts.bury_job(job_id, "undecodable", failure.message)
            return None

    async def next_ready_ms(
        self, models: Models, *, min_priority: Priority = Priority.BULK, worker: str = ""
    ) -> int | None:
        """Return ms until jobs of `models` are ready for `worker`: 0 when they are, None when none is queued.

        0 does not promise a claim: another worker can be faster, or a job can need more slots than are free.
        """
        return await self._scripts.next_ready_ms(worker, RANKS.index(min_priority), *_load_times(models))

    async def wait_wakeup(self, timeout_s: float) -> Priority | None:
        """Wait up to `timeout_s`, at most 2 s, for new jobs; return their highest possible priority, or None.

        Wake-ups between two calls count for the second one; the first call returns at once.
        """
        with translated():
            if self._wakeup_id is None:
                last = await self._blocking.xrevrange(self._keys.wakeup, count=1)
                self._wakeup_id = last[0][0] if last else "0-0"
                return RANKS[0]
            block_ms = max(1, min(MAX_BLOCK_MS, round(timeout_s * 1000)))
            reply = await self._blocking.xread({self._keys.wakeup: self._wakeup_id}, block=block_ms)
        entries = [entry for _, rows in reply or () for entry in rows]
        if not entries:
            return None
        self._wakeup_id = entries[-1][0]
        # A full stream can have dropped wake-ups of any priority.
        return RANKS[0] if len(entries) >= WAKEUPS_KEPT else RANKS[min(_rank(fields) for _, fields in entries)]

    async def renew(self, worker: str, claims: Mapping[str, int]) -> Renewal:
        """Renew the leases of `claims` (job id to epoch) that are still this worker's."""
        replies = [await self._scripts.renew(worker, *pairs) for pairs in _chunks(claims)]
        return Renewal(
            lost=frozenset(job_id for lost, _ in replies for job_id in lost),
            cancel=frozenset(job_id for _, canceled in replies for job_id in canceled),
        )

    async def settle(self, worker: str, job_id: str, epoch: int, outcome: Outcome, *, token: str | None = None) -> bool:
        """End a job with its outcome; False if the claim is not this worker's or the job has ended.

        A caller that repeats a call passes the same `token`, and gets the reply of the first call.
        """
        return await self._scripts.settle(
            worker,
            job_id,
            epoch,
            token or secrets.token_hex(8),
            state=outcome.state.value,
            artifacts=ARTIFACTS.dump_json(outcome.artifacts).decode(),
            error=None if outcome.error is None else outcome.error.model_dump_json(),
            batching=outcome.batching.model_dump_json(),
            timings=outcome.timings.model_dump_json(),
            gpu_seconds=outcome.gpu_seconds,
            step=outcome.progress.step,
            total=outcome.progress.total,
        )

    async def report_progress(self, *reports: ProgressReport) -> int:
        """Publish the progress of current claims in one message, and store it with `store`; return how many are."""
        rows = [
            (one.job_id, one.epoch, int(one.store), one.phase.value, one.progress.step, one.progress.total)
            for one in reports
        ]
        return await self._scripts.report_progress(*(value for row in rows for value in row))

    async def release(self, worker: str, claims: Mapping[str, int]) -> int:
        """Return jobs to the front of the queue without counting a loss; return how many were still claimed."""
        return sum([await self._scripts.release(worker, *pairs) for pairs in _chunks(claims)])

    async def learn_efficient_rows(self, signature: str, rows: int) -> None:
        """Store for a day that `rows` rows fill a forward of `signature` efficiently: so many make it ready at once."""
        with translated():
            await self._redis.set(self._keys.efficient_rows(signature), max(1, rows), ex=86_400)

    async def close(self) -> None:
        """Finish releasing the jobs of canceled claims."""
        await asyncio.gather(*self.unfinished)


def _load_times(models: Models) -> list[str | int]:
    return _pairs(models if isinstance(models, Mapping) else dict.fromkeys(models, 0))


def _pairs(values: Mapping[str, int]) -> list[str | int]:
    return [part for pair in values.items() for part in pair]


def _chunks(claims: Mapping[str, int]) -> list[list[str | int]]:
    """Return job ids and epochs for at most 100 jobs per script."""
    flat = _pairs(claims)
    return [flat[first : first + 200] for first in range(0, len(flat), 200)]


def _rank(wakeup: Mapping[str, str]) -> int:
    rank = wakeup.get("rank", "")
    return int(rank) if rank.isdecimal() and int(rank) < len(RANKS) else 0
