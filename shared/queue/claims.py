"""The worker's side: claiming jobs, keeping them, and settling them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeAlias

import structlog
from pydantic import ValidationError

from shared.errors import RedisUnavailable
from shared.job import Failure, Job, Outcome, Priority, State, decode, is_newer
from shared.queue.client import MAX_BLOCK_MS, QueueClient, QueueComponent, translated
from shared.queue.event_feed import progress_message
from shared.queue.records import ARTIFACTS, RANKS, Claim, ProgressReport, Renewal
from shared.queue.scripts import ClaimRow

log = structlog.get_logger()

Models: TypeAlias = Sequence[str] | Mapping[str, int]
"""Models of a worker; in a mapping each with the ms that loading it takes, 0 where it is in memory. Those in memory go
first, and those that another worker holds are left to it, both for as long as a load makes worth it. Negative where the
last load failed: nothing is left to who claims it."""

WAKEUPS_KEPT = 16
"""How many entries the wake-up stream holds, as `line.lua` trims it."""


class Claims(QueueComponent):
    def __init__(self, client: QueueClient) -> None:
        super().__init__(client)
        self.outdated = False
        """Set once a job of a newer version was claimed: this worker must stop, so that a newer one runs the job."""
        self._woken_at: str | None = None
        self.unfinished: set[asyncio.Future[None]] = set()

    async def claim(
        self,
        worker: str,
        models: Models,
        seats: int,
        *,
        lowest: Priority = Priority.BULK,
        accompanied: bool = False,
    ) -> list[Claim]:
        """Start a batch: claim jobs of one ripe signature of `models`, up to `seats` seats; [] when there are none.

        `lowest` is the least urgent priority to take. A job that was lost comes alone (`Claim.alone`), and not at all
        to a worker whose other jobs would accompany it.
        """
        if seats < 1 or not models:
            return []
        reply = self._scripts.claim(worker, seats, RANKS.index(lowest), accompanied, *_pairs_of(models))
        return await self._claimed(worker, reply) or []

    async def join(
        self,
        worker: str,
        signature: str,
        seats: int,
        *,
        models: Models = (),
        lowest: Priority = Priority.BULK,
        held_back: Callable[[str], None] = lambda _signature: None,
    ) -> list[Claim]:
        """Claim more jobs of a running batch's signature, ripe or not, up to `seats` seats.

        While another signature of `models` is overdue, only jobs more urgent than its own are given; `held_back` is
        called where that leaves none. Never gives a job that is to run alone.
        """
        if seats < 1:
            return []
        reply = self._scripts.join(worker, signature, seats, RANKS.index(lowest), *_pairs_of(models))
        claims = await self._claimed(worker, reply)
        if claims is None:
            held_back(signature)
        return claims or []

    async def _claimed(self, worker: str, reply: Coroutine[Any, Any, list[ClaimRow] | None]) -> list[Claim] | None:
        """Return what a script claimed; None: others are overdue."""
        # A claim cut off on its way would leave jobs in nobody's hands until their lease ends: it runs to its end, and
        # what nobody waits for any more is given back.
        task = asyncio.create_task(reply)
        try:
            rows = await asyncio.shield(task)
        except asyncio.CancelledError:
            giving_back = asyncio.ensure_future(self._give_back(worker, task))
            self.unfinished.add(giving_back)
            giving_back.add_done_callback(self.unfinished.discard)
            raise
        if rows is None:
            return None
        claims = []
        for row in rows:
            job = await self._decoded(worker, row)
            if job is not None:
                _, _, signature, epoch, solo, queued_ms = row
                claims.append(Claim(job, signature, epoch, epoch, bool(solo), queued_ms))
        return claims

    async def _give_back(self, worker: str, claimed: asyncio.Future[list[ClaimRow] | None]) -> None:
        try:
            rows = await claimed
            await self.release(worker, {row[0]: row[3] for row in rows or ()})
        except RedisUnavailable as error:
            log.warning("claims_not_given_back", worker=worker, reason=error.message)

    async def _decoded(self, worker: str, row: ClaimRow) -> Job | None:
        job_id, wire, _, epoch, _, _ = row
        try:
            return decode(wire)
        except ValidationError as error:
            if is_newer(wire):
                self.outdated = True
                await self.release(worker, {job_id: epoch})
                log.error("job_of_newer_version", job_id=job_id, remedy="upgrade this worker; the job is given back")
                return None
            log.error("job_undecodable", job_id=job_id, faults=error.error_count())
            failure = Failure(code="undecodable", message="the job's record cannot be read by this version")
            if await self.settle(worker, job_id, epoch, Outcome(state=State.FAILED, error=failure)):
                await self._scripts.bury_job(job_id, "undecodable", failure.message)
            return None

    async def next_ready_ms(self, models: Models, *, lowest: Priority = Priority.BULK, worker: str = "") -> int | None:
        """Return ms until something of `models` may be started: 0 when it may now, None when nothing waits.

        Jobs less urgent than `lowest` do not count. `worker` is who would start it.

        0 is no promise of a claim: another worker may be faster, or what is ripe may need more seats than are free.
        """
        return await self._scripts.next_ready_ms(worker, RANKS.index(lowest), *_pairs_of(models))

    async def wait_wakeup(self, timeout_s: float) -> Priority | None:
        """Wait until jobs come that may change what can be claimed, for at most `timeout_s` and at most 2 s.

        Returns the most urgent priority that they may be of, None where nothing came. No wake-up since the last call
        is missed; the first call returns at once.
        """
        with translated():
            if self._woken_at is None:
                last = await self._blocking.xrevrange(self._keys.wakeup, count=1)
                self._woken_at = last[0][0] if last else "0-0"
                return RANKS[0]
            block_ms = max(1, min(MAX_BLOCK_MS, round(timeout_s * 1000)))
            reply = await self._blocking.xread({self._keys.wakeup: self._woken_at}, block=block_ms)
        woken = [entry for _, entries in reply or () for entry in entries]
        if not woken:
            return None
        self._woken_at = woken[-1][0]
        # As many as the stream holds: there may have been more, of any priority.
        return RANKS[0] if len(woken) >= WAKEUPS_KEPT else RANKS[min(_rank(fields) for _, fields in woken)]

    async def renew(self, worker: str, claims: Mapping[str, int]) -> Renewal:
        """Renew the leases of `claims` (job id to epoch) that are still this worker's."""
        answers = [await self._scripts.renew(worker, *pairs) for pairs in _pairs(claims)]
        return Renewal(
            lost=frozenset(job_id for lost, _ in answers for job_id in lost),
            cancel=frozenset(job_id for _, cancel in answers for job_id in cancel),
        )

    async def settle(self, worker: str, job_id: str, epoch: int, outcome: Outcome, *, token: str | None = None) -> bool:
        """End a job with its outcome. False, and nothing is written: the claim is not ours, or the job has ended.

        A caller that repeats a call passes the same `token` each time: then it is told what became of the first.
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
        """Tell all who listen how far jobs are, in one message; returns how many records it was written to.

        It is written where the report says so and its claim is current.
        """
        rows = [
            part
            for one in reports
            if one.store
            for part in (one.job_id, one.epoch, one.phase.value, one.progress.step, one.progress.total)
        ]
        return await self._scripts.report_progress(progress_message(reports), *rows)

    async def release(self, worker: str, claims: Mapping[str, int]) -> int:
        """Give unfinished jobs back to the front of their line, no loss counted; returns how many were still ours."""
        return sum([await self._scripts.release(worker, *pairs) for pairs in _pairs(claims)])

    async def learn_efficient_rows(self, signature: str, seats: int) -> None:
        """Remember for a day that more than `seats` seats of `signature` do not pay: as many make it ripe at once."""
        with translated():
            await self._redis.set(self._keys.efficient_rows(signature), max(1, seats), ex=86_400)

    async def close(self) -> None:
        """Finish releasing the jobs of canceled claims."""
        await asyncio.gather(*self.unfinished)


def _pairs_of(models: Models) -> list[str | int]:
    loads = models if isinstance(models, Mapping) else dict.fromkeys(models, 0)
    return [part for pair in loads.items() for part in pair]


def _rank(wakeup: Mapping[str, str]) -> int:
    told = wakeup.get("rank", "")
    return int(told) if told.isdecimal() and int(told) < len(RANKS) else 0


def _pairs(claims: Mapping[str, int]) -> list[list[str | int]]:
    """Return job ids and epochs as scripts take them, at most 100 jobs a script."""
    flat = [part for pair in claims.items() for part in pair]
    return [flat[first : first + 200] for first in range(0, len(flat), 200)]
