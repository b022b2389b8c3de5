"""Dead letters: jobs that were given up, and entries that cannot be read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from shared.queue import scripts
from shared.queue.client import QueueComponent
from shared.queue.connections.errors import translated
from shared.queue.maintenance.retention import EndedJob
from shared.queue.records import DeadLetter, page_after, record
from shared.queue.transactions import Transaction


@dataclass(frozen=True)
class LetterFilter:
    """Which dead letters are meant; times are in ms, the first is inclusive. An entry without a job has no tenant."""

    tenant: str | None = None
    model: str | None = None
    reason: str | None = None
    after_ms: int | None = None
    before_ms: int | None = None

    def matches(self, letter: DeadLetter) -> bool:
        job = None if letter.record is None else letter.record.job
        return (
            self.tenant in (None, job and job.tenant)
            and self.model in (None, job and job.model)
            and self.reason in (None, letter.reason)
            and (self.after_ms or 0) <= letter.at_ms < (self.before_ms or math.inf)
        )


EVERY = LetterFilter()
_OF_EARLIER_RUNS = (
    *("finished", "expires", "error", "artifacts", "batching", "timings", "warnings", "settled", "cancel", "started"),
    *("losses", "attempts", "deadline", "start_by", "steps", "passed", "resumed"),
)
"""Fields of a job that a redrive deletes."""


class DeadLetters(QueueComponent):
    async def page(
        self, after: str | None = None, limit: int = 100, *, newest_first: bool = True, matching: LetterFilter = EVERY
    ) -> tuple[list[DeadLetter], str | None]:
        """Return those of the next `limit` dead letters that match, and the cursor `after` of the next page, if any."""
        await self._forget_expired()
        with translated():
            page, cursor = await page_after(
                self._redis, self._keys.dead_letters, after, limit, newest_first=newest_first
            )
        letters = await self._read([letter_id for letter_id, _ in page])
        return list(filter(matching.matches, letters)), cursor

    async def count(self) -> int:
        await self._forget_expired()
        with translated():
            return int(await self._redis.zcard(self._keys.dead_letters))

    async def _forget_expired(self) -> None:
        async def attempt(transaction: Transaction) -> None:
            transaction.call("forget_expired_letters")

        await self._transact(attempt, when_full=True)

    async def added(self) -> int:
        """Return how many dead letters there have been in all."""
        with translated():
            return int(await self._redis.get(self._keys.dead_letters_added) or 0)

    async def get(self, letter_id: str) -> DeadLetter | None:
        return next(iter(await self._read([letter_id])), None)

    async def _read(self, ids: Sequence[str]) -> list[DeadLetter]:
        rows = await self._hashes(name(one) for one in ids for name in (self._keys.dead_letter, self._keys.job))
        return [
            DeadLetter(letter_id, int(row.get("at", 0)), row.get("reason", ""), row.get("detail", ""), record(job))
            for letter_id, row, job in zip(ids, rows[0::2], rows[1::2], strict=True)
            if row
        ]

    async def redrive(self, job_id: str) -> bool:
        """Requeue the job of a dead letter without its attempts, losses and deadline; False if there is none."""
        return await self._transact(partial(self._redrive, job_id), when_full=True)

    async def _redrive(self, job_id: str, transaction: Transaction) -> bool:
        """Queue a job again, to run solo. Its epoch continues, so that object keys never collide."""
        name, letters = self._keys.job(job_id), self._keys.dead_letters
        letter, row = await transaction.read(("ZSCORE", letters, job_id), ("HMGET", name, "state", "input", "sources"))
        state, inputs, sources = row
        job = await EndedJob.read(transaction, self._keys, job_id)
        if letter is None or state != "failed" or job is None:
            return False
        transaction.write("ZREM", letters, job_id)
        transaction.write("DEL", self._keys.dead_letter(job_id))
        transaction.write("PERSIST", name)
        transaction.write("ZREM", self._keys.retention, job.row())
        transaction.write("HDEL", name, *_OF_EARLIER_RUNS)
        transaction.write("HSET", name, "solo", 1)
        transaction.call("hold_inputs", job.tenant, inputs or "")
        transaction.call("hold_sources", job_id, sources or "")
        transaction.call("requeue", job_id, "solo")
        return True

    async def purge(self, job_id: str) -> bool:
        """Delete a dead letter and its job's record; False if there is none."""

        async def attempt(transaction: Transaction) -> bool:
            (letter,) = await transaction.read(("ZSCORE", self._keys.dead_letters, job_id))
            if letter is None:
                return False
            transaction.write("ZREM", self._keys.dead_letters, job_id)
            transaction.write("DEL", self._keys.dead_letter(job_id))
            job = await EndedJob.read(transaction, self._keys, job_id)
            if job is not None:
                job.forget(transaction, self._keys, transaction.now_ms)
            return True

        return await self._transact(attempt, when_full=True)

    async def bury(self, job_id: str, reason: str, detail: str) -> None:
        """Add a job that has ended to the dead letters, and keep it as long as its letter."""

        async def attempt(transaction: Transaction) -> None:
            name, ms = self._keys.job(job_id), scripts.DEAD_LETTERS_MS
            ttl, inputs = await transaction.read(("PTTL", name), ("HGET", name, "input"), fenced=False)
            job = await EndedJob.read(transaction, self._keys, job_id)
            transaction.call("bury", job_id, reason, detail)
            if job is None or ttl >= ms:
                return
            expires_ms = transaction.now_ms + ms
            transaction.write("HSET", name, "expires", expires_ms)
            transaction.write("PEXPIRE", name, ms)
            transaction.write("ZADD", self._keys.retention, expires_ms, job.row())
            transaction.call("keep_inputs", job.tenant, inputs or "", ms)

        await self._transact(attempt, when_full=True)
