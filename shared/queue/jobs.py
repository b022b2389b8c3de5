"""Jobs: submitting, reading, canceling and deleting them."""

import hashlib
import math
from collections.abc import Sequence
from typing import Any

from shared.config.adapters import uploaded_ids
from shared.errors import Conflict, FusequeueError, IdempotencyMismatch, InputRejected, InvalidRequest, QueueFull
from shared.job import Job, encode
from shared.job_fields import OnDeadline, OnParentFailure
from shared.job_record import JobRecord
from shared.queue import scripts
from shared.queue.client import EXPIRED_ROWS, LIST_ROUNDS, QueueComponent
from shared.queue.connections.errors import translated
from shared.queue.inputs import object_name
from shared.queue.maintenance.dependents import unfinished_dependents
from shared.queue.maintenance.retention import EndedJob
from shared.queue.order.expected_ends import queue_positions
from shared.queue.order.facts import place_facts, unfinished_jobs
from shared.queue.order.position import QueuePosition, queue_position
from shared.queue.quotas import full_queue_retry_s, quota_exceeded
from shared.queue.records import Submission, SubmitResult, record, start_after
from shared.queue.script_arguments import SubmitArgs
from shared.queue.transactions import Transaction

MAX_SUBMISSIONS = 500
"""Jobs per script: more would block Redis for over 5 ms."""

MAX_LISTED = 1000


class Jobs(QueueComponent):
    async def submit(
        self, submissions: Sequence[Submission], *, positions: bool = False
    ) -> list[SubmitResult | FusequeueError]:
        """Queue 1 to `MAX_SUBMISSIONS` jobs in one script; return the result of each, in order.

        A result can be a `QueueFull`, such as `QuotaExceeded`, `IdempotencyMismatch`, or `InvalidRequest` of a job that
        cannot be written, which leaves the others as they are. Submitting is idempotent
        by job id; a job is queued completely or not at all. `positions` returns those of newly queued jobs, and
        their deadlines.
        """
        if not 1 <= len(submissions) <= MAX_SUBMISSIONS:
            raise ValueError(f"submit takes 1 to {MAX_SUBMISSIONS} jobs, not {len(submissions)}")
        jobs = [_submit_args(submission, self._client.process) for submission in submissions]
        written = [job for job in jobs if isinstance(job, SubmitArgs)]
        replies = iter(await self._scripts.submit(positions, *written) if written else ())
        pairs = zip(jobs, submissions, strict=True)
        return [job if isinstance(job, InvalidRequest) else self._result(next(replies), one) for job, one in pairs]

    async def submitted_before(self, tenant: str, idempotency_key: str, fingerprint: str | None) -> SubmitResult | None:
        """Return the job of the tenant's idempotency key, deleted or not, or None; raises `IdempotencyMismatch`.

        Saves a replay from work such as fetching images; `submit` decides again.
        """
        with translated():
            known = await self._redis.get(self._keys.idempotency(tenant, _digest(idempotency_key)))
        job_id, _, known_fingerprint = (known or "").partition(" ")
        if not job_id:
            return None
        if known_fingerprint != (fingerprint or ""):
            raise _mismatch()
        return SubmitResult(job_id=job_id, replayed=True)

    async def reserve_key(self, tenant: str, idempotency_key: str, fingerprint: str, object_id: str) -> str:
        """Return the id of the object that the key creates: `object_id`, or that of an earlier request.

        Raises `IdempotencyMismatch` or `QuotaExceeded`.
        """
        name = self._keys.idempotency(tenant, _digest(idempotency_key))
        counter, lives_ms = self._keys.idempotency_keys(tenant), 1000 * self._client.policy("idempotency_s")

        async def attempt(transaction: Transaction) -> str:
            (known,) = await transaction.read(("GET", name))
            (count,) = await transaction.read(("GET", counter), fenced=False)  # each submit with a key changes it
            if known:
                known_id, _, known_fingerprint = known.partition(" ")
                if known_fingerprint != fingerprint:
                    raise _mismatch()
                return str(known_id)
            if int(count or 0) >= scripts.IDEMPOTENCY_KEYS:
                raise quota_exceeded(tenant, "idempotency_keys")
            transaction.write("SET", name, f"{object_id} {fingerprint}", "PX", lives_ms)
            transaction.write("INCR", counter)
            if count is None:
                transaction.write("PEXPIRE", counter, lives_ms)
            return object_id

        return await self._transact(attempt)

    def _result(self, reply: Sequence[Any], submission: Submission) -> SubmitResult | FusequeueError:
        code, detail = reply[:2]
        if code in ("ok", "replayed"):
            position = _position(reply[2]) if len(reply) > 2 else None
            deadline_at_ms = int(reply[3]) if len(reply) > 3 and reply[3] else None
            return SubmitResult(str(detail), code == "replayed", position, deadline_at_ms)
        if code == "mismatch":
            return _mismatch()
        if code == "parent":
            return _no_parent(submission.job, int(detail), str(reply[2]))
        if code == "input":
            return _no_input(submission.job, str(detail))
        if code == "quota":
            return quota_exceeded(submission.job.tenant, detail, int(reply[2]) if reply[2] else None)
        scope = f"tenant {submission.job.tenant!r}" if code == "tenant_full" else "the service"
        message = f"queue full: {scope} has the maximum of queued jobs; retry later"
        return QueueFull(message, retry_after_s=full_queue_retry_s(int(detail), float(reply[2]) if reply[2] else None))

    async def get(self, job_id: str) -> JobRecord | None:
        """Return a job's record."""
        return (await self.get_many([job_id]))[0]

    async def get_many(self, job_ids: Sequence[str]) -> list[JobRecord | None]:
        """Return the records of jobs, in one round trip."""
        return [record(fields) for fields in await self._hashes(map(self._keys.job, job_ids))]

    async def position(self, job_id: str) -> QueuePosition | None:
        """Return a queued job's position among the jobs of its signature; None if it is not queued, or paused.

        Beyond 32 jobs ahead in its lane, canceled ones count until the lane reaches them. `eta_s` assumes the
        signature's recent rate of completions; None when no job has ended within the hour. That of a job that waits
        adds the mean time of its signature's jobs to the latest end of those that it waits for: None where they are
        more than 64 in all, or one of them has no estimate.
        """
        return (await self.positions(job_id)).get(job_id)

    async def positions(self, job_id: str) -> dict[str, QueuePosition]:
        """Return the positions of a job and of the queued ones that it waits for, the nearest 64, in one read."""
        return queue_positions(unfinished_jobs(await self._scripts.read_places(job_id)))

    async def page(  # noqa: PLR0913 - what is listed, and the page of it
        self,
        tenant: str,
        *,
        batch_id: str | None = None,
        group: str | None = None,
        parent: str | None = None,
        after: str | None = None,
        limit: int = 20,
        created_ms: tuple[float, float] = (0, math.inf),
        newest_first: bool = True,
    ) -> tuple[list[JobRecord], str | None]:
        """Return up to `limit` jobs of a tenant, of one of its groups or batches or of the children of one of its jobs,
        and the cursor `after` of the next page, if any.

        `after` is the id of the last job seen, which can have been deleted; a page can be empty although another one
        follows, where many have expired. `created_ms`: first, and end.
        """
        index = self._index(tenant, batch_id, group, parent)
        limit = max(1, min(limit, MAX_LISTED))
        with translated():
            start = await self._start(index, after, created_ms, newest_first)
        found: list[JobRecord] = []
        count, more = limit + 1, True
        for _ in range(LIST_ROUNDS):
            with translated():
                rows = await self._redis.zrange(index, start, start + count - 1, desc=newest_first, withscores=True)
            ids = [row[0] for row in rows if created_ms[0] <= row[1] < created_ms[1]]
            found += [one for one in await self.get_many(ids) if one is not None]
            more = len(ids) == count
            if not more or len(found) > limit:
                break
            start, count, after = start + count, EXPIRED_ROWS, ids[-1]
        shown = found[:limit]
        if not more and len(found) <= limit:
            return shown, None
        return shown, shown[-1].job.id if shown else after

    def _index(self, tenant: str, batch_id: str | None, group: str | None, parent: str | None) -> str:
        """Return the index with the jobs of a parent, a group, a batch or a tenant: of the first that is named."""
        if parent is not None:
            return self._keys.child_jobs(tenant, parent)
        if group is not None:
            return self._keys.group_jobs(tenant, group)
        return self._keys.jobs(tenant) if batch_id is None else self._keys.batch_jobs(tenant, batch_id)

    async def _start(self, index: str, after: str | None, created: tuple[float, float], newest_first: bool) -> int:
        """Return the rank of a page's first job: after the cursor and within the times."""
        low, high = created
        skipped = 0
        if newest_first and high < math.inf:
            skipped = int(await self._redis.zcount(index, high, "+inf"))
        elif not newest_first and low > 0:
            skipped = int(await self._redis.zcount(index, "-inf", f"({low}"))
        if after is None:
            return skipped
        return max(skipped, await start_after(self._redis, index, after, newest_first=newest_first))

    async def nth_newer(self, tenant: str, job_id: str, count: int) -> str | None:
        """Return the job that a tenant submitted `count` jobs after `job_id`, or None."""
        index = self._keys.jobs(tenant)
        with translated():
            offset = await self._redis.zrevrank(index, job_id)
            if offset is None or int(offset) < count:
                return None
            found = await self._redis.zrange(index, int(offset) - count, int(offset) - count, desc=True)
        return str(found[0]) if found else None

    async def video_page(
        self, tenant: str, after: str | None, limit: int, newest_first: bool
    ) -> tuple[list[JobRecord], bool]:
        """Return up to `limit` video jobs of a tenant, and whether there are more; `after` is the last job seen."""

        async def read(ids: list[str]) -> list[JobRecord]:
            return [one for one in await self.get_many(ids) if one is not None]

        return await self._page_of(self._keys.videos(tenant), read, after, limit, newest_first=newest_first)

    async def cancel(self, job_id: str) -> JobRecord | None:
        """Cancel a job and return its record, or None.

        A queued job ends at once. A running one is marked; its worker learns of it when it renews the lease.
        """
        await self._scripts.cancel_jobs(job_id)
        return await self.get(job_id)

    async def pause(self, job_id: str) -> JobRecord | None:
        """Pause a job until it is resumed, and return its record, or None.

        A queued job leaves its lane at once. A running one is marked; its worker learns of it when it renews the lease,
        and releases it.
        """
        await self._scripts.pause_jobs(job_id)
        return await self.get(job_id)

    async def resume(self, job_id: str) -> JobRecord | None:
        """End the pause of a job, which keeps its place by age, and return its record, or None."""
        await self._scripts.resume_jobs(job_id)
        return await self.get(job_id)

    async def forget(self, job_id: str) -> bool:
        """Delete a job that has ended, before its files; False if there is none.

        A later sweep deletes its files that are left, also those that a worker without a lease was still uploading.
        Raises `Conflict` while a job that has not ended starts from an artifact of this one.
        """

        async def attempt(transaction: Transaction) -> tuple[bool, str | None]:
            job = await EndedJob.read(transaction, self._keys, job_id)
            needed = await unfinished_dependents(transaction, self._keys, [job_id])
            if job is not None and job_id not in needed:
                uploads_end_ms = self._client.policy("lease_ms") + 60_000
                job.forget(transaction, self._keys, transaction.now_ms + uploads_end_ms)
            return job is not None, needed.get(job_id)

        has_ended, child = await self._transact(attempt, when_full=True)
        if has_ended and child is not None:
            message = f"job {job_id} has an artifact from which job {child} starts; cancel that one first"
            raise Conflict(message, param="id")
        return has_ended


def _mismatch() -> IdempotencyMismatch:
    return IdempotencyMismatch("Idempotency-Key was used with another body; use a new key", param="Idempotency-Key")


def _no_parent(job: Job, place: int, state: str) -> InvalidRequest:
    """Return the refusal of a job that cannot wait for one of its parents, by the field that names it."""
    parent = job.parents[place]
    inputs = (name for name, ref in job.inputs.items() if ref.source is not None and ref.source.job == parent)
    param = next(inputs, None)
    known = {"gone": "there is no such job", "full": f"{scripts.MAX_CHILDREN} jobs wait for it already"}
    remedy = 'send on_parent_failure "run" to run all the same' if param is None else "it has no result to start from"
    param = param or f"after.{place}"
    return InvalidRequest(f"{param}: {known.get(state) or f'it is {state}; {remedy}'}", param=param)


def _no_input(job: Job, input_id: str) -> InvalidRequest:
    """Return the refusal of a job with an input or an adapter that was deleted after its request had been checked."""
    param = next((name for name, ref in job.inputs.items() if ref.id == input_id), None)
    if param is not None:
        return InputRejected(f"{param}: input {input_id} was deleted during the request; upload it again", param=param)
    at = next(at for at, one in enumerate(job.adapters) if one.id == input_id)
    return InvalidRequest(f"adapter {input_id} was deleted during the request", param=f"adapters.{at}.id")


def _digest(idempotency_key: str) -> str:
    return hashlib.sha256(idempotency_key.encode()).hexdigest()[:40]


def _position(reply: str) -> QueuePosition | None:
    """Return the position in a reply of `submit`; None of a job that is in no lane."""
    facts = place_facts(reply)
    return None if facts is None else queue_position(facts)


def _submit_args(submission: Submission, process: str) -> SubmitArgs | InvalidRequest:
    """Return the arguments for a job, or why it cannot be written."""
    try:
        return _written(submission, process)
    except ValueError as error:
        return InvalidRequest(f"the job cannot be written: {error}")


def _written(submission: Submission, process: str) -> SubmitArgs:
    job = submission.job
    inputs = job.inputs
    stored = {f"{ref.id}|{object_name(ref, job.tenant)}" for ref in inputs.values() if ref.source is None}
    sources = job.sources if inputs else ()
    idempotency = ""
    if submission.idempotency_key is not None:
        idempotency = f"{_digest(submission.idempotency_key)} {submission.fingerprint or ''}"
    return SubmitArgs(
        id=job.id,
        tenant=job.tenant,
        rank=job.priority.rank,
        slots=job.slots,
        sig=submission.signature,
        model=job.model,
        window=submission.window_ms,
        max_batch=submission.max_batch,
        wire=encode(job),
        created=job.created_at_ms,
        time_limit_ms=job.time_limit_ms,
        not_before=job.not_before_ms,
        after=" ".join(job.parents if sources else job.after),
        on_parent="" if job.on_parent_failure is OnParentFailure.FAIL else job.on_parent_failure.value,
        batch=job.batch_id or "",
        sources=" ".join(sources),
        ended_sources=" ".join(job.ended_sources if inputs else ()),
        input=" ".join(sorted({*stored, *uploaded_ids(job.adapters)})),
        idempotency=idempotency,
        webhook="" if job.webhook is None else f"|{'|'.join(job.webhook.states)}| {job.webhook.url}",
        video=1 if job.task.makes_video else None,
        on_deadline="" if job.on_deadline is OnDeadline.EXPIRE else job.on_deadline.value,
        steps=job.computed_steps_per_image,
        sync_call="" if submission.sync_call is None else f"{submission.sync_call} {process}",
        group=job.group or "",
    )
