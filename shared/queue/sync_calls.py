"""Requests that wait for a job, so that one which is sent again finds the job of its first try."""

from __future__ import annotations

from shared.queue.client import QueueComponent, translated

MAX_TRIES = 1_000
"""Jobs kept for one body: as many equal requests may be under way and find their own again."""

BEYOND_WAIT_MS = 60_000


class SyncCalls(QueueComponent):
    """For each tenant and body, the jobs whose answers are not delivered.

    A job's score is 1000 for each retry, and one for each request that waits: those that nobody waits for come first,
    and a score that has not changed tells that nothing has happened.
    """

    async def start(self, tenant: str, digest: str, job_id: str) -> None:
        """Note that a request waits for the job that it made."""
        name = self._keys.tries(tenant, digest)
        with translated():
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.zadd(name, {job_id: 1})
                pipe.zremrangebyrank(name, MAX_TRIES, -1)
                pipe.pexpire(name, self._kept_ms)
                await pipe.execute()

    async def join(self, tenant: str, digest: str) -> str | None:
        """Return the job that a retry goes on waiting for, of several the one it is likeliest to have made."""
        found = await self._client.run("join_try", tenant, digest, self._kept_ms)
        return None if found is None else str(found)

    async def leave(self, tenant: str, digest: str, job_id: str) -> int | None:
        """Note that a request waits no more, and return what `abandon_try` is to be told; None: it was delivered."""
        score = await self._client.run("leave_try", tenant, digest, job_id)
        return None if score is None else int(score)

    async def abandon(self, tenant: str, digest: str, job_id: str, left: int) -> bool:
        """Forget a job where nothing has happened since `leave_try` gave `left`, and nobody waits for it."""
        return bool(await self._client.run("abandon_try", tenant, digest, job_id, left))

    async def delivered(self, tenant: str, digest: str, job_id: str) -> None:
        """Forget a job whose answer has been delivered: the same request, sent again, means a new one."""
        with translated():
            await self._redis.zrem(self._keys.tries(tenant, digest), job_id)

    @property
    def _kept_ms(self) -> int:
        return self._settings.sync_wait_s * 1000 + BEYOND_WAIT_MS
