"""The API's side: putting jobs in line, canceling and forgetting them, and the pictures they start from."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from shared.errors import FusequeueError, IdempotencyMismatch, QueueFull
from shared.job import InputRef, JobRecord, encode
from shared.queue.client import Connected, translated
from shared.queue.records import paired, record
from shared.queue.values import RANKS, Submission, Submitted

MAX_SUBMISSIONS = 500
"""Jobs a script: more would keep Redis from others for longer than some 5 ms."""


class Submitting(Connected):
    async def submit(self, submissions: Sequence[Submission]) -> list[Submitted | FusequeueError]:
        """Put 1 to 500 jobs in line by one script, and return what became of each, in order.

        An outcome may be `QueueFull` or `IdempotencyMismatch`. A job is in line whole or not at all. Sending the same
        jobs again is safe: a job that is known by its id is not put in line a second time.
        """
        if not 1 <= len(submissions) <= MAX_SUBMISSIONS:
            raise ValueError(f"submit takes 1 to {MAX_SUBMISSIONS} jobs, not {len(submissions)}")
        args: list[str | int] = [len(submissions)]
        for submission in submissions:
            args += _fields(submission)
        answers = await self.run("submit", *args)
        return [self._outcome(answer, submission) for answer, submission in zip(answers, submissions, strict=True)]

    async def submitted_before(self, tenant: str, idempotency_key: str, fingerprint: str | None) -> Submitted | None:
        """Return the job that the tenant's key stands for, or raise `IdempotencyMismatch`; None: `submit` decides.

        Asked before work that a replay does not need, such as fetching a picture.
        """
        with translated():
            known = await self.redis.get(self.keys.idem(tenant, _digest(idempotency_key)))
            job_id, _, known_print = (known or "").partition(" ")
            if not job_id or not await self.redis.exists(self.keys.job(job_id)):
                return None
        if known_print != (fingerprint or ""):
            raise _mismatch()
        return Submitted(job_id=job_id, replayed=True)

    def _outcome(self, answer: list[Any], submission: Submission) -> Submitted | FusequeueError:
        code, detail = answer
        if code in ("ok", "replayed"):
            return Submitted(job_id=str(detail), replayed=code == "replayed")
        if code == "mismatch":
            return _mismatch()
        whose = f"tenant {submission.job.tenant!r}" if code == "tenant_full" else "the queue"
        return QueueFull(f"{whose} has as many jobs waiting as are allowed", retry_after_s=-(-int(detail) // 1000))

    async def cancel(self, job_id: str) -> JobRecord | None:
        """Cancel a job and return it as it is then; None when there is no such job.

        A waiting job is canceled at once. A running one is marked: its worker is told when it renews its lease, and
        settles it. A job that has ended stays as it is.
        """
        return record(paired(await self.run("cancel", job_id)))

    async def forget(self, job_id: str) -> bool:
        """Delete a job that has ended, whose pictures the caller has removed. False: no such job, or it has not ended.

        A sweep looks for more a minute after the last lease can have ended: an upload may have been under way.
        """
        return bool(await self.run("forget", job_id))

    async def put_input(self, tenant: str, ref: InputRef, ttl_s: int) -> InputRef:
        """Remember a picture for `ttl_s`, and for as long as a job that has not ended uses it.

        Returns the one to use: that which is known under its id already, if there is one. From here on its object is
        removed when its time is over, so that one that is stored next cannot be forgotten.
        """
        name = ref.key.removeprefix(f"inputs/{tenant}/{ref.id}").strip("/")
        wire = await self.run("put_input", tenant, ref.id, ref.model_dump_json(), ttl_s * 1000, name)
        return _input(wire) or ref

    async def get_input(self, tenant: str, input_id: str) -> InputRef | None:
        with translated():
            wire = await self.redis.hget(self.keys.input(tenant, input_id), "ref")
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


def _fields(submission: Submission) -> list[str | int]:
    job = submission.job
    once = ""
    if submission.idempotency_key is not None:
        once = f"{_digest(submission.idempotency_key)} {submission.fingerprint or ''}"
    return [
        job.id,
        job.tenant,
        RANKS.index(job.priority),
        job.slots,
        submission.signature,
        job.model,
        submission.window_ms,
        submission.max_batch,
        encode(job),
        job.created_at_ms,
        "" if job.deadline_at_ms is None else job.deadline_at_ms,
        job.batch_id or "",
        " ".join(sorted({ref.id for ref in job.inputs.values()})),
        once,
        "" if job.webhook is None else f"|{'|'.join(job.webhook.states)}| {job.webhook.url}",
        1 if job.task.makes_video else "",
    ]
