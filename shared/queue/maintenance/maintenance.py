"""Lost workers, deadlines, retention, and repair after a failover."""

import math
from contextlib import suppress

from shared.batch import file_prefix
from shared.errors import Conflict, RedisUnavailable
from shared.inputs import adapter_store
from shared.queue.client import QueueComponent
from shared.queue.connections.errors import translated
from shared.queue.maintenance.reconcile import Reconciliation
from shared.queue.records import ExpiredItem
from shared.queue.transactions import Transaction
from shared.runtime.clock import now_ms

CHORES = ("deliver", "advance", "sweep", "move-on", "reconcile")
"""The periodic chores."""


class Maintenance(QueueComponent):
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

    async def expired_items(self, limit: int = 100) -> list[ExpiredItem]:
        """Return items whose retention has ended; remove each from storage, then call `forget_item`."""
        return [_expired_item(row) for row in await self._scripts.expired_items(limit)]

    async def forget_input(self, tenant: str, input_id: str) -> ExpiredItem | None:
        """Delete the record of an input; remove the item from storage, then call `forget_item`, or a sweep does both.

        Returns None for an unknown input; raises `Conflict` while a job that has not ended uses it.
        """
        name = self._keys.input(tenant, input_id)

        async def attempt(transaction: Transaction) -> ExpiredItem | None:
            ((ref, stored, size, live),) = await transaction.read(("HMGET", name, "ref", "object", "size", "live"))
            if ref is None:
                return None
            if int(live or 0) > 0:
                message = f"input {input_id} is used by a job that has not ended; cancel the job first"
                raise Conflict(message, param="id")
            row = f"input|{tenant}|{input_id}|{stored or ''}|{size or ''}"
            transaction.write("DEL", name)
            transaction.write("ZREM", self._keys.inputs(tenant), input_id)
            transaction.write("ZADD", self._keys.retention, transaction.now_ms, row)
            return _expired_item(row)

        return await self._transact(attempt, when_full=True)

    async def forget_item(self, item: ExpiredItem) -> None:
        """Delete the record and indexes of an item that storage no longer holds."""
        await self._scripts.forget_item(item.row)

    async def postpone_item(self, item: ExpiredItem, again_ms: int) -> None:
        """Postpone an item that storage cannot delete: `expired_items` returns it again after `again_ms`."""
        at_ms = await self._client.now_ms() + again_ms
        with translated():
            await self._redis.zadd(self._keys.retention, {item.row: at_ms}, xx=True, gt=True)  # if it is still due

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


def _expired_item(row: str) -> ExpiredItem:
    kind, tenant, item_id, rest, *_ = row.split("|")
    if kind == "input":
        return ExpiredItem("input", tenant, item_id, f"inputs/{tenant}/{item_id}/{rest}", row)
    if kind == "file":
        return ExpiredItem("file", tenant, item_id, file_prefix(tenant, item_id), row)
    if kind == "adapter":
        return ExpiredItem("adapter", tenant, item_id, adapter_store.prefix(tenant, item_id), row)
    return ExpiredItem("job", tenant, item_id, f"jobs/{item_id}/", row)
