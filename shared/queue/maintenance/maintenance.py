"""Lost workers, deadlines, retention, and repair after a failover."""

import math
from contextlib import suppress

from shared.errors import RedisUnavailable
from shared.queue.connections.errors import translated
from shared.queue.maintenance.reconcile import Reconciliation
from shared.queue.maintenance.retention import Retention
from shared.runtime.clock import now_ms

CHORES = ("deliver", "advance", "sweep", "move-on", "reconcile")
"""The periodic chores."""


class Maintenance(Retention):
    async def reclaim(self, limit: int = 100) -> list[str]:
        """Requeue up to `limit` jobs whose lease has expired, to run solo; return their ids.

        A loss while solo counts as the job's own; after `max_attempts` of them the job fails with code `worker_lost`
        and becomes a dead letter.
        """
        return await self._scripts.reclaim(limit)

    async def expire(self, limit: int = 100) -> int:
        """End all queued jobs that can no longer meet their deadline; return how many.

        Those past their latest start that still can become late. A script reads `limit` jobs before their latest start,
        and as many late ones.
        """
        ended, due = await self._scripts.expire(limit)
        while due:
            more, due = await self._scripts.expire(limit)
            ended += more
        return ended

    async def pending_work(self) -> tuple[bool, bool]:
        """Return whether webhook deliveries are pending, and whether batches are active."""
        with translated():
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.exists(self._keys.outbox_tenants, self._keys.webhook_tenants)
                pipe.exists(self._keys.batch_tenants)
                webhooks, batches = await pipe.execute()
        return bool(webhooks), bool(batches)

    async def note_chore(self, chore: str) -> None:
        """Record that a chore ends now without an error; does nothing while Redis is full or unavailable."""
        with suppress(RedisUnavailable), translated():
            await self._redis.hset(self._keys.chores, chore, str(now_ms()))

    async def chore_ages_s(self) -> dict[str, float]:
        """Return the seconds since each of `CHORES` ended without an error: infinity if none did, 0 without work."""
        webhooks, batches = await self.pending_work()
        with translated():
            times = await self._redis.hmget(self._keys.chores, list(CHORES))
        now, idle = now_ms(), {"deliver": not webhooks, "advance": not batches}
        ages_s = {
            chore: math.inf if at is None else max(0, now - int(at)) / 1000
            for chore, at in zip(CHORES, times, strict=True)
        }
        return {chore: 0.0 if idle.get(chore) else age_s for chore, age_s in ages_s.items()}

    async def reconcile(self, budget_s: float = math.inf) -> int:
        """Repair disagreements between jobs, lanes and counters, as after a failover; return how many.

        It scans all keys of the namespace in small scripts, concurrently with other work, and continues where the last
        call used up its `budget_s`. Only one caller at a time does so, the others return 0.
        """
        run = Reconciliation(self._client, budget_s)
        await run.run()
        return run.repaired

    async def reconcile_unfinished(self) -> bool:
        """Return whether a `reconcile` used up its time before its end, and no process continues it now."""
        with translated():
            progress, lock = await self._redis.exists(self._keys.reconcile_progress), self._keys.reconciling
            return bool(progress) and not await self._redis.exists(lock)
