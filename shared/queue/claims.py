"""Claims: a worker's side of the queue, from claiming jobs to settling them."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from contextlib import suppress
from itertools import starmap
from typing import Any, TypeAlias

import structlog
from cachetools import TTLCache
from pydantic import ValidationError

from shared.errors import RedisUnavailable
from shared.job import Job, State, decode, encode, is_newer
from shared.job_fields import Priority
from shared.job_record import Failure, Outcome
from shared.queue.checkpoints import JobCheckpoint
from shared.queue.choosing import JobChooser
from shared.queue.client import QueueClient, QueueComponent
from shared.queue.connections.errors import translated
from shared.queue.maintenance.dead_letters import DeadLetters
from shared.queue.maintenance.tenant_usage import used_by
from shared.queue.order.jobs import Batch
from shared.queue.records import ARTIFACTS, WARNINGS, Claim, ProgressReport, Renewal
from shared.queue.script_arguments import ClaimKey, Models, ProgressRow
from shared.queue.scripts import DUE_AT_ONCE, ClaimRow
from shared.queue.transactions import Transaction

log = structlog.get_logger()

_Request: TypeAlias = Callable[[str], Awaitable[list[ClaimRow] | None]]
"""A claim or join, called with its token."""

REJECT_WAIT_S = 1.0
"""How long the readable jobs of a claim wait for the others to be rejected."""

MAX_CAUSE_CHARS = 200

MOST_PAGES = 64
"""Workers of this process of which the page of ready signatures is kept, so long that new ones are found again."""

PAGE_KEPT_S = 10.0


class Claims(QueueComponent):
    def __init__(self, client: QueueClient) -> None:
        super().__init__(client)
        self.outdated = False
        """Set when a job of a newer version was claimed: this worker must stop, so that a newer one runs it."""
        self.unfinished: set[asyncio.Future[None]] = set()
        """Releases of canceled claims, and jobs being rejected; `close` waits for them."""
        self._pages: TTLCache[str, int] = TTLCache(MOST_PAGES, PAGE_KEPT_S)  # by worker
        self._unanswered: dict[str, str] = {}  # by worker, the token of its last request if no reply came

    async def claim(
        self,
        worker: str,
        models: Models,
        slots: int,
        *,
        min_priority: Priority = Priority.BULK,
        has_other_jobs: bool = False,
        preempted: Collection[str] = (),
        capacity: int = 0,
    ) -> list[Claim]:
        """Start a batch: claim jobs of one ready signature of `models`, up to `slots` slots and down to `min_priority`.

        A lost job is claimed by itself (`Claim.must_run_solo`), and not at all for a worker with jobs that run on.
        `preempted` are the tenants with jobs that the claimed ones would preempt: a tenant that has used much more
        preempts none of them. `capacity`: slots of the worker when it runs nothing, if that is more than `slots`; an
        overdue job that needs more than are free is waited for if it fits into them.
        """
        if slots < 1 or not models:
            return []

        def request(token: str) -> Awaitable[list[ClaimRow]]:
            chooser = self._chooser(worker, models, slots, capacity, min_priority, preempted, token)
            return self._claim(chooser, Batch.BESIDE if has_other_jobs else Batch.ALONE)

        return await self._claimed(worker, request) or []

    async def join(
        self,
        worker: str,
        signature: str,
        slots: int,
        *,
        models: Models = (),
        min_priority: Priority = Priority.BULK,
        preempted: Collection[str] = (),
        capacity: int = 0,
        on_overdue: Callable[[str], None] = lambda _signature: None,
    ) -> list[Claim]:
        """Claim more jobs of a running batch's signature, ready or not; never a job that must run solo.

        While another signature of `models` is overdue and the next claim would choose it, only jobs of a higher
        priority than its own are claimed; `on_overdue` is called when that leaves none. `preempted` and `capacity`: as
        in `claim`.
        """
        if slots < 1:
            return []

        def request(token: str) -> Awaitable[list[ClaimRow] | None]:
            chooser = self._chooser(worker, models, slots, capacity, min_priority, preempted, token)
            return chooser.join(signature)

        claims = await self._claimed(worker, request)
        if claims is None:
            on_overdue(signature)
        return claims or []

    async def _claim(self, chooser: JobChooser, batch: Batch) -> list[ClaimRow]:
        """Claim; the next claims of this worker begin at the page of signatures at which this one ended."""
        chooser.page = self._pages.get(chooser.worker, 0)
        rows = await chooser.claim(batch)
        if chooser.page:
            self._pages[chooser.worker] = chooser.page
        else:
            self._pages.pop(chooser.worker, None)
        return rows

    def _chooser(
        self,
        worker: str,
        models: Models,
        slots: int,
        capacity: int,
        min_priority: Priority,
        preempted: Collection[str] = (),
        token: str = "",
    ) -> JobChooser:
        load_ms = models if isinstance(models, Mapping) else dict.fromkeys(models, 0)
        most = max(slots, capacity)
        return JobChooser(self._scripts, worker, token, load_ms, slots, most, min_priority.rank, preempted)

    async def _claimed(self, worker: str, request: _Request) -> list[Claim] | None:
        # Canceling the request could leave claimed jobs without a worker until their leases end. So it completes in any
        # case, and the claims of a canceled call are released.
        task = asyncio.create_task(self._send(worker, request))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._finish_later(self._release_claimed(worker, task))
            raise

    async def _send(self, worker: str, request: _Request) -> list[Claim] | None:
        """Claim, and reject the jobs that cannot be read.

        After an error, the worker's next request repeats the token: it returns what this one has claimed, if anything.
        """
        token = self._unanswered.pop(worker, None) or secrets.token_hex(8)
        try:
            rows = await request(token)
        except RedisUnavailable:
            self._unanswered[worker] = token
            raise
        if rows is None:
            return None
        claims, rejects = [], []
        for row in rows:
            try:
                claims.append(_claim(row))
            except (ValueError, TypeError, RecursionError) as error:
                rejects.append(self._finish_later(self._reject(worker, row, error)))
        if rejects:
            await asyncio.wait(rejects, timeout=REJECT_WAIT_S)
        return claims

    def _finish_later(self, action: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
        task = asyncio.ensure_future(action)
        self.unfinished.add(task)
        task.add_done_callback(self.unfinished.discard)
        return task

    async def _release_claimed(self, worker: str, claimed: asyncio.Future[list[Claim] | None]) -> None:
        try:
            await self.release(worker, {one.job.id: one.epoch for one in await claimed or ()})
        except RedisUnavailable as error:
            log.warning("claims_not_released", worker=worker, reason=error.message)

    async def _reject(self, worker: str, row: ClaimRow, error: Exception) -> None:
        """Release a job of a newer version; fail any other that cannot be read, and keep it as a dead letter.

        A worker that has released one claims no more: it would claim the same job at once.
        """
        job_id, epoch = row[0], row[3]
        try:
            if is_newer(row[1]):
                self.outdated = True
                await self.release(worker, {job_id: epoch})
                remedy = f"upgrade this worker, or run `fusequeue cancel {job_id}` with an API of the newer version"
                log.error("job_of_newer_version", job_id=job_id, remedy=remedy)
                return
            failure = Failure(code="undecodable", message=f"this version cannot read the job's record: {_cause(error)}")
            log.error("job_undecodable", job_id=job_id, cause=failure.message)
            if await self.settle(worker, job_id, epoch, Outcome(state=State.FAILED, error=failure)):
                await DeadLetters(self._client).bury(job_id, "undecodable", failure.message)
        except RedisUnavailable as unavailable:  # its lease ends, and the next worker rejects it
            log.warning("job_not_rejected", job_id=job_id, reason=unavailable.message)

    async def next_ready_ms(
        self, models: Models, *, min_priority: Priority = Priority.BULK, worker: str = ""
    ) -> int | None:
        """Return ms until jobs of `models` are ready for `worker`: 0 when they are, None when none is queued.

        0 does not promise a claim: another worker can be faster, or a job can need more slots than are free.
        """
        ready_ms = await self._chooser(worker, models, 1, 0, min_priority).next_ready_ms()
        return None if ready_ms is None else round(ready_ms)

    async def has_overdue(self, worker: str, models: Models, min_priority: Priority, slots: int) -> bool:
        """Return whether `worker`, with `slots` when it runs nothing, could claim overdue jobs of `models` that have at
        least that priority."""
        return await self._chooser(worker, models, slots, slots, min_priority).has_overdue()

    async def renew(self, worker: str, claims: Mapping[str, int]) -> Renewal:
        """Renew the leases of `claims` (job id to epoch) that are still this worker's."""
        replies = [await self._scripts.renew(worker, *keys) for keys in _chunks(claims)]
        return Renewal(
            lost=frozenset(job_id for lost, _, _ in replies for job_id in lost),
            cancel=frozenset(job_id for _, canceled, _ in replies for job_id in canceled),
            pause=frozenset(job_id for _, _, paused in replies for job_id in paused),
        )

    async def settle(
        self,
        worker: str,
        job_id: str,
        epoch: int,
        outcome: Outcome,
        *,
        token: str | None = None,
        job: Job | None = None,
    ) -> bool:
        """End a job with its outcome; False if the claim is not this worker's or the job has ended.

        A caller that repeats a call passes the same `token`, and gets the reply of the first call. With `job`, its
        record loses the signatures of its PUT URLs, and has the size that was made.
        """
        changes = {} if job is None else _changes_at_end(job, outcome)
        wire = encode(job.model_copy(update=changes)) if job is not None and changes else None
        stored = [artifact for artifact in outcome.artifacts if artifact.location is None]
        reply = await self._scripts.settle(
            worker,
            job_id,
            epoch,
            token or secrets.token_hex(8),
            state=outcome.state.value,
            artifacts=ARTIFACTS.dump_json(outcome.artifacts).decode(),
            error=None if outcome.error is None else outcome.error.model_dump_json(),
            batching=outcome.batching.model_dump_json(),
            timings=outcome.timings.model_dump_json(),
            device_seconds=outcome.device_seconds,
            step=outcome.progress.step,
            total=outcome.progress.total,
            objects=sum(1 if one.thumbnail is None else 2 for one in stored),
            stored_bytes=sum(one.bytes + (one.thumbnail.bytes if one.thumbnail else 0) for one in stored),
            wire=wire,
            used=used_by(outcome).wire(),
            warnings=WARNINGS.dump_json(outcome.warnings).decode() if outcome.warnings else None,
            device_times="" if outcome.device_times is None else outcome.device_times.wire(),
            resumed=outcome.resumed_steps,
        )
        if reply > 1:
            with suppress(RedisUnavailable):  # the next heartbeat does the same
                await self._scripts.queue_due(DUE_AT_ONCE)
        return bool(reply)

    async def keep_checkpoint(self, worker: str, claim: Claim, checkpoint: JobCheckpoint) -> str:
        """Name a stored checkpoint in the job's record, instead of an earlier one.

        Returns `kept`, `stale` if the claim is no longer this worker's, `full` if those of all tenants have as many
        bytes as they may, or the quota of the tenant that it exceeds.
        """
        job_id, text, size = claim.job.id, checkpoint.wire(), checkpoint.size()
        return await self._scripts.keep_checkpoint(
            worker, job_id, claim.epoch, text, size, step=checkpoint.step, left=checkpoint.left
        )

    async def count_run(self, job: Job, token: str, outcome: Outcome) -> bool:
        """Count what a run has used that has lost or returned its claim; False if `settle` has, with the same token."""
        used = used_by(outcome).wire()

        async def attempt(transaction: Transaction) -> bool:
            (settled,) = await transaction.read(("HGET", self._keys.job(job.id), "settled"))
            if settled == token:
                return False
            transaction.call("count_run", job.tenant, job.model, used)
            return True

        return await self._transact(attempt, when_full=True)

    async def report_progress(self, *reports: ProgressReport) -> int:
        """Publish the progress of current claims in one message, and store it with `store`; return how many are."""
        rows = (
            ProgressRow(one.job_id, one.epoch, one.store, one.phase.value, one.progress.step, one.progress.total)
            for one in reports
        )
        return await self._scripts.report_progress(*rows)

    async def release(self, worker: str, claims: Mapping[str, int]) -> int:
        """Return jobs to the front of the queue, without an attempt or a loss; return how many were still claimed."""
        return sum([await self._scripts.give_up(worker, None, *keys) for keys in _chunks(claims)])

    async def lose(self, worker: str, claims: Mapping[str, int], cause: str) -> int:
        """Give up jobs that end their worker; return how many were still claimed.

        Each counts a loss, as an expired lease does: a job lost `max_attempts` times solo fails with the last `cause`.
        """
        return sum([await self._scripts.give_up(worker, cause, *keys) for keys in _chunks(claims)])

    async def learn_efficient_rows(self, signature: str, rows: int) -> None:
        """Store for a day that `rows` rows fill a forward of `signature` efficiently: so many make it ready at once."""
        with translated():
            await self._redis.set(self._keys.efficient_rows(signature), max(1, rows), ex=86_400)

    async def close(self) -> None:
        """Finish releasing and rejecting jobs."""
        await asyncio.gather(*self.unfinished)


def _cause(error: Exception) -> str:
    """Return the first fault in a job's wire form, without its values."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        return f"{'.'.join(map(str, first['loc'])) or 'record'}: {first['msg']}"[:MAX_CAUSE_CHARS]
    return f"{type(error).__name__}: {error}"[:MAX_CAUSE_CHARS]


def _claim(row: ClaimRow) -> Claim:
    _, wire, signature, epoch, solo, queued_ms, left_ms, slack_ms, checkpoint = row
    return Claim(
        decode(wire),
        signature,
        epoch=epoch,
        must_run_solo=bool(solo),
        queued_ms=queued_ms,
        time_left_ms=left_ms if left_ms >= 0 else None,
        slack_ms=slack_ms if slack_ms >= 0 else None,
        checkpoint=JobCheckpoint.parsed(checkpoint),
    )


def _chunks(claims: Mapping[str, int]) -> list[list[ClaimKey]]:
    """Return the keys of claims for at most 100 jobs per script."""
    keys = list(starmap(ClaimKey, claims.items()))
    return [keys[first : first + 100] for first in range(0, len(keys), 100)]


def _changes_at_end(job: Job, outcome: Outcome) -> dict[str, object]:
    """Return the fields that change when a job ends: pipelines round sides, and some choose them by an image."""
    changes: dict[str, object] = {} if job.output is None else {"output": job.output.without_signatures()}
    sizes = {(one.width, one.height) for one in outcome.artifacts if one.kind != "latents"}
    if len(sizes) == 1 and (size := sizes.pop()) != (job.width, job.height):
        changes |= {"width": size[0], "height": size[1]}
    return changes
