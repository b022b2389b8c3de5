"""Synchronous calls: lets a retry find the job of its earlier attempt."""

from __future__ import annotations

from shared.queue.client import QueueComponent, translated

MAX_CALLS = 1_000
"""Jobs per request body: so many equal requests can run and be retried at once."""

_MARGIN_MS = 60_000


class SyncCalls(QueueComponent):
    """Per tenant and request digest, a sorted set of the jobs whose response is not delivered.

    Score: 1000 per retry plus 1 per waiting request. A retry joins the lowest score: the job with the fewest retries,
    then without a waiting request, then the oldest. An unchanged score shows that no request has joined or left.
    """

    async def start(self, tenant: str, digest: str, job_id: str) -> None:
        """Record that a request waits for the job it has created."""
        name = self._keys.sync_calls(tenant, digest)
        with translated():
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.zadd(name, {job_id: 1})
                pipe.zremrangebyrank(name, MAX_CALLS, -1)
                pipe.pexpire(name, self._keep_ms)
                await pipe.execute()

    async def join(self, tenant: str, digest: str) -> str | None:
        """Return the job for a retry to wait for."""
        return await self._scripts.join_sync_call(tenant, digest, self._keep_ms)

    async def leave(self, tenant: str, digest: str, job_id: str) -> int | None:
        """Record that a request no longer waits, and return the score for `abandon`; None: delivered."""
        with translated():
            score = await self._redis.zadd(self._keys.sync_calls(tenant, digest), {job_id: -1}, xx=True, incr=True)
        return None if score is None else int(score)

    async def abandon(self, tenant: str, digest: str, job_id: str, score: int) -> bool:
        """Remove a job without waiting requests; False if its score has changed since `leave`."""
        return await self._scripts.abandon_sync_call(tenant, digest, job_id, score)

    async def delivered(self, tenant: str, digest: str, job_id: str) -> None:
        """Remove a job whose response was delivered: an equal request then creates a new one."""
        with translated():
            await self._redis.zrem(self._keys.sync_calls(tenant, digest), job_id)

    @property
    def _keep_ms(self) -> int:
        return self._settings.sync_wait_s * 1000 + _MARGIN_MS
