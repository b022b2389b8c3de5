"""Jobs in the queue: submitting, reading, canceling and forgetting them, and their input images."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from pydantic import ValidationError

from shared.errors import FusequeueError, IdempotencyMismatch, InvalidRequest, QueueFull
from shared.job import InputRef, JobRecord, encode
from shared.queue.client import QueueComponent, translated
from shared.queue.records import RANKS, QueuePosition, Submission, Submitted, paired, record
from shared.queue.scripts import SubmittedJob
from shared.runtime.clock import id_time_ms

MAX_SUBMISSIONS = 500
"""Jobs a script: more would keep Redis from others for longer than some 5 ms."""

MAX_LISTED = 1000
_LIST_ROUNDS = 5


class Jobs(QueueComponent):
    async def submit(self, submissions: Sequence[Submission]) -> list[Submitted | FusequeueError]:
        """Put 1 to 500 jobs in line by one script, and return what became of each, in order.

        An outcome may be `QueueFull` or `IdempotencyMismatch`. A job is in line whole or not at all. Sending the same
        jobs again is safe: a job that is known by its id is not put in line a second time.
        """
        if not 1 <= len(submissions) <= MAX_SUBMISSIONS:
            raise ValueError(f"submit takes 1 to {MAX_SUBMISSIONS} jobs, not {len(submissions)}")
        answers = await self._scripts.submit(*map(_submitted_job, submissions))
        return [self._outcome(answer, submission) for answer, submission in zip(answers, submissions, strict=True)]

    async def submitted_before(self, tenant: str, idempotency_key: str, fingerprint: str | None) -> Submitted | None:
        """Return the job that the tenant's key stands for, or raise `IdempotencyMismatch`; None: `submit` decides.

        Asked before work that a replay does not need, such as fetching a picture.
        """
        with translated():
            known = await self._redis.get(self._keys.idempotency(tenant, _digest(idempotency_key)))
            job_id, _, known_print = (known or "").partition(" ")
            if not job_id or not await self._redis.exists(self._keys.job(job_id)):
                return None
        if known_print != (fingerprint or ""):
            raise _mismatch()
        return Submitted(job_id=job_id, replayed=True)

    def _outcome(self, answer: tuple[str, str], submission: Submission) -> Submitted | FusequeueError:
        code, detail = answer
        if code in ("ok", "replayed"):
            return Submitted(job_id=str(detail), replayed=code == "replayed")
        if code == "mismatch":
            return _mismatch()
        whose = f"tenant {submission.job.tenant!r}" if code == "tenant_full" else "the queue"
        return QueueFull(f"{whose} has as many jobs waiting as are allowed", retry_after_s=-(-int(detail) // 1000))

    async def get(self, job_id: str) -> JobRecord | None:
        """Return what is known of a job: one read."""
        with translated():
            return record(await self._redis.hgetall(self._keys.job(job_id)))

    async def get_many(self, job_ids: Sequence[str]) -> list[JobRecord | None]:
        """Return what is known of each job, in one round trip."""
        if not job_ids:
            return []
        with translated():
            async with self._redis.pipeline(transaction=False) as pipe:
                for job_id in job_ids:
                    pipe.hgetall(self._keys.job(job_id))
                return [record(fields) for fields in await pipe.execute()]

    async def position(self, job_id: str) -> QueuePosition | None:
        """Return where a waiting job stands among those of its signature; None when it does not wait.

        Exact up to 500 jobs ahead in its lane, estimated from arrival times beyond. `eta_s` supposes that jobs go on
        ending at the signature's pace of late; None where none has ended within the hour.
        """
        answer = await self._scripts.queue_position(job_id)
        if not answer:
            return None
        position, eta_ms = answer
        return QueuePosition(position=position, eta_s=None if eta_ms < 0 else eta_ms / 1000)

    async def page(
        self,
        tenant: str,
        *,
        batch_id: str | None = None,
        after: str | None = None,
        limit: int = 20,
        created_after_ms: int | None = None,
        created_before_ms: int | None = None,
    ) -> tuple[list[JobRecord], str | None]:
        """Return up to `limit` of a tenant's jobs, newest first, and what to pass as `after` for more; None: no more.

        `after` is the id of the last job seen, which may have been deleted since. `created_after_ms` is inclusive,
        `created_before_ms` exclusive.
        """
        index = self._keys.jobs(tenant) if batch_id is None else self._keys.batch_jobs(tenant, batch_id)
        limit = max(1, min(limit, MAX_LISTED))
        start = await self._start(index, after, created_before_ms)
        found: list[JobRecord] = []
        for _ in range(_LIST_ROUNDS):
            wanted = limit - len(found)
            with translated():
                rows = await self._redis.zrange(index, start, start + wanted, desc=True, withscores=True)
            start += wanted
            ids = [row[0] for row in rows if created_after_ms is None or row[1] >= created_after_ms]
            more = len(ids) > wanted
            found += [one for one in await self.get_many(ids[:wanted]) if one is not None]
            if not more or len(found) >= limit:
                return found, found[-1].job.id if more and found else None
        return found, found[-1].job.id if found else None

    async def _start(self, index: str, after: str | None, before_ms: int | None) -> int:
        with translated():
            skipped = 0 if before_ms is None else int(await self._redis.zcount(index, before_ms, "+inf"))
            if after is None:
                return skipped
            rank = await self._redis.zrevrank(index, after)
            if rank is not None:
                return max(skipped, int(rank) + 1)
            at_ms = id_time_ms(after)
            if at_ms is None:
                raise InvalidRequest("after: it must be the `next_cursor` of a page of this list", param="after")
            # Deleted since: where it stood, by its time, and among those of the same millisecond by its id.
            later = int(await self._redis.zcount(index, f"({at_ms}", "+inf"))
            beside = await self._redis.zrange(index, at_ms, at_ms, byscore=True, offset=0, num=MAX_LISTED)
            return max(skipped, later + sum(str(one) > after for one in beside))

    async def nth_newer(self, tenant: str, job_id: str, count: int) -> str | None:
        """Return the job that was put in line `count` later than one of a tenant's; None where there is none."""
        index = self._keys.jobs(tenant)
        with translated():
            rank = await self._redis.zrevrank(index, job_id)
            if rank is None or int(rank) < count:
                return None
            found = await self._redis.zrange(index, int(rank) - count, int(rank) - count, desc=True)
        return str(found[0]) if found else None

    async def video_page(
        self, tenant: str, after: str | None, limit: int, newest_first: bool
    ) -> tuple[list[JobRecord], bool]:
        """Return up to `limit` of a tenant's video jobs, and whether there are more; `after` is the last job seen."""
        index = self._keys.videos(tenant)
        with translated():
            rank = -1
            if after is not None:
                found = await (self._redis.zrevrank if newest_first else self._redis.zrank)(index, after)
                if found is None:
                    raise InvalidRequest("after: there is no such video, or no longer", param="after")
                rank = int(found)
            ids = await self._redis.zrange(index, rank + 1, rank + 1 + limit, desc=newest_first)
        records = await self.get_many([str(one) for one in ids[:limit]])
        return [one for one in records if one is not None], len(ids) > limit

    async def cancel(self, job_id: str) -> JobRecord | None:
        """Cancel a job and return it as it is then; None when there is no such job.

        A waiting job is canceled at once. A running one is marked: its worker is told when it renews its lease, and
        settles it. A job that has ended stays as it is.
        """
        return record(paired(await self._scripts.cancel_job(job_id)))

    async def forget(self, job_id: str) -> bool:
        """Delete a job that has ended, whose pictures the caller has removed. False: no such job, or it has not ended.

        A sweep looks for more a minute after the last lease can have ended: an upload may have been under way.
        """
        return await self._scripts.forget_job(job_id)

    async def put_input(self, tenant: str, ref: InputRef, ttl_s: int) -> InputRef:
        """Remember a picture for `ttl_s`, and for as long as a job that has not ended uses it.

        Returns the one to use: that which is known under its id already, if there is one. From here on its object is
        removed when its time is over, so that one that is stored next cannot be forgotten.
        """
        name = ref.key.removeprefix(f"inputs/{tenant}/{ref.id}").strip("/")
        wire = await self._scripts.put_input(tenant, ref.id, ref.model_dump_json(), ttl_s * 1000, name)
        return _input(wire) or ref

    async def get_input(self, tenant: str, input_id: str) -> InputRef | None:
        with translated():
            wire = await self._redis.hget(self._keys.input(tenant, input_id), "ref")
        return _input(wire)


def _mismatch() -> IdempotencyMismatch:
    return IdempotencyMismatch(
        "this Idempotency-Key came with another body before; use a new key", param="Idempotency-Key"
    )


def _digest(idempotency_key: str) -> str:
    return hashlib.sha256(idempotency_key.encode()).hexdigest()[:40]


def _input(wire: str | None) -> InputRef | None:
    try:
        return None if wire is None else InputRef.model_validate_json(wire)
    except ValidationError:
        return None


def _submitted_job(submission: Submission) -> SubmittedJob:
    job = submission.job
    idempotency = ""
    if submission.idempotency_key is not None:
        idempotency = f"{_digest(submission.idempotency_key)} {submission.fingerprint or ''}"
    return SubmittedJob(
        id=job.id,
        tenant=job.tenant,
        rank=RANKS.index(job.priority),
        slots=job.slots,
        sig=submission.signature,
        model=job.model,
        window=submission.window_ms,
        max_batch=submission.max_batch,
        wire=encode(job),
        created=job.created_at_ms,
        deadline="" if job.deadline_at_ms is None else job.deadline_at_ms,
        batch=job.batch_id or "",
        input=" ".join(sorted({ref.id for ref in job.inputs.values()})),
        idempotency=idempotency,
        webhook="" if job.webhook is None else f"|{'|'.join(job.webhook.states)}| {job.webhook.url}",
        video=1 if job.task.makes_video else "",
    )
