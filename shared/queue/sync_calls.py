"""Synchronous calls: which requests wait for which jobs, so that a retry waits for the job of an earlier attempt."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import NamedTuple

from shared.queue import scripts
from shared.queue.client import QueueComponent
from shared.queue.transactions import Transaction


class _Call(NamedTuple):
    """A row of a sorted set of `SyncCalls`. A score is below 0 when a request left twice."""

    text: str
    object_id: str
    process: str
    score: int
    retries: int

    @classmethod
    def of(cls, text: str, score: str) -> _Call:
        object_id, _, process = text.partition(" ")
        return cls(text, object_id, process, int(score), (int(score) + 500) // 1000)


class SyncCalls(QueueComponent):
    """Per tenant and request digest, a sorted set of the jobs with a response that is not delivered, with the API
    process of the request that waits.

    Score: 1000 per retry, plus 1 while a request waits. A retry joins the lowest score for which no request of a living
    process waits: the job with the fewest retries, then the oldest. An unchanged score shows that no request joined.
    """

    async def start(self, tenant: str, digest: str, object_id: str) -> None:
        """Record that a request waits for the file or batch that it creates; `submit` does so for a job."""
        name = self._keys.sync_calls(tenant, digest)

        async def attempt(transaction: Transaction) -> None:
            transaction.write("ZADD", name, "NX", 1, self._call(object_id))
            transaction.write("ZREMRANGEBYRANK", name, scripts.MAX_SYNC_CALLS, -1)
            transaction.write("PEXPIRE", name, self._kept_ms())

        await self._transact(attempt, when_full=True)

    async def join(self, tenant: str, digest: str, *, waited_for: bool = False) -> str | None:
        """Return the job for a retry to wait for, with `waited_for` also one for which a request waits already.

        Without one, "" if requests of living processes wait for all jobs, and None if there are no jobs.
        """
        name = self._keys.sync_calls(tenant, digest)

        async def attempt(transaction: Transaction) -> str | None:
            (rows,) = await transaction.read(("ZRANGE", name, 0, -1, "WITHSCORES"), fenced=False)
            calls = [_Call.of(*row) for row in zip(rows[::2], rows[1::2], strict=True)]
            alive = set() if waited_for else await self._living(transaction, {one.process for one in calls})
            for one in calls:
                if one.score <= 1000 * one.retries or one.process not in alive:
                    (score,) = await transaction.read(("ZSCORE", name, one.text))
                    if score is None or int(score) != one.score:  # another retry has joined it
                        continue
                    transaction.write("ZREM", name, one.text)
                    transaction.write("ZADD", name, 1000 * (one.retries + 1) + 1, self._call(one.object_id))
                    transaction.write("PEXPIRE", name, self._kept_ms())
                    return one.object_id
            return "" if calls else None

        return await self._transact(attempt, when_full=True)

    async def _living(self, transaction: Transaction, processes: AbstractSet[str]) -> set[str]:
        """Return this process, and which of the `processes` live."""
        channels = {self._keys.api_process(one): one for one in processes}
        reads = [("PUBSUB", "NUMSUB", *channels)] if channels else []
        alive = {self._client.process}
        for rows in await transaction.read(*reads, fenced=False):
            alive |= {channels[name] for name, count in zip(rows[::2], rows[1::2], strict=True) if count > 0}
        return alive

    async def leave(self, tenant: str, digest: str, job_id: str) -> int | None:
        """Record that a request no longer waits, and return the score for `abandon`; None: delivered, or taken over."""
        name = self._keys.sync_calls(tenant, digest)

        async def attempt(transaction: Transaction) -> int | None:
            (score,) = await transaction.read(("ZSCORE", name, self._call(job_id)))
            if score is None:
                return None
            transaction.write("ZADD", name, "XX", int(score) - 1, self._call(job_id))
            return int(score) - 1

        return await self._transact(attempt, when_full=True)

    async def abandon(self, tenant: str, digest: str, job_id: str, score: int) -> bool:
        """Remove a job that a request has left; False if its score has changed since `leave`."""
        name = self._keys.sync_calls(tenant, digest)

        async def attempt(transaction: Transaction) -> bool:
            (current,) = await transaction.read(("ZSCORE", name, self._call(job_id)))
            if current is None or int(current) != score:
                return False
            transaction.write("ZREM", name, self._call(job_id))
            return True

        return await self._transact(attempt, when_full=True)

    def _kept_ms(self) -> int:
        return 1000 * self._client.policy("sync_wait_s") + 60_000

    async def delivered(self, tenant: str, digest: str, job_id: str) -> None:
        """Remove a job whose response was delivered: an equal request then creates a new one."""
        await self._client.command("ZREM", self._keys.sync_calls(tenant, digest), self._call(job_id))

    def _call(self, object_id: str) -> str:
        return f"{object_id} {self._client.process}"
