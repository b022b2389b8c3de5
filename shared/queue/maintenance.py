"""Maintenance: lost workers, deadlines, retention, dead letters, and repair after a failover."""

import math
from collections.abc import Sequence

from shared.protocols.openai import files
from shared.queue.client import QueueComponent, translated
from shared.queue.reconcile import Reconciliation
from shared.queue.records import DeadLetter, ExpiredItem, record


class Maintenance(QueueComponent):
    async def reclaim(self, limit: int = 100) -> list[str]:
        """Requeue up to `limit` jobs whose lease has expired, to run solo; return their ids.

        A loss while solo counts as the job's own; after `max_attempts` of them the job fails with code `worker_lost`
        and becomes a dead letter.
        """
        return await self._scripts.reclaim(limit)

    async def expire(self, limit: int = 100) -> int:
        """End up to `limit` queued jobs whose deadline has passed; return how many."""
        return await self._scripts.expire(limit)

    async def pending_work(self) -> tuple[bool, bool]:
        """Return whether webhook deliveries are pending, and whether batches are active."""
        with translated():
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.exists(self._keys.webhook_outbox, self._keys.webhook_hosts)
                pipe.exists(self._keys.active_batches)
                webhooks, batches = await pipe.execute()
        return bool(webhooks), bool(batches)

    async def expired_items(self, limit: int = 100) -> list[ExpiredItem]:
        """Return items whose retention has ended; remove each from storage, then call `forget_item`."""
        return [_expired_item(row) for row in await self._scripts.expired_items(limit)]

    async def forget_item(self, item: ExpiredItem) -> None:
        """Delete the record and indexes of an item that storage no longer holds."""
        await self._scripts.forget_item(item.row)

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


class DeadLetters(QueueComponent):
    async def page(self, after: str | None = None, limit: int = 100) -> tuple[list[DeadLetter], str | None]:
        """Return dead letters, newest first, and the cursor `after` of the next page, if any."""
        with translated():
            rank = None if after is None else await self._redis.zrevrank(self._keys.dead_letters, after)
            start = 0 if rank is None else rank + 1
            ids = await self._redis.zrange(self._keys.dead_letters, start, start + limit, desc=True)
        return await self._read(ids[:limit]), ids[limit - 1] if len(ids) > limit else None

    async def count(self) -> int:
        with translated():
            return int(await self._redis.zcard(self._keys.dead_letters))

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
        """Requeue the job of a dead letter without its attempts and losses; False if there is none."""
        return await self._scripts.redrive_dead_letter(job_id)

    async def purge(self, job_id: str) -> bool:
        """Delete a dead letter and its job's record; False if there is none."""
        return await self._scripts.purge_dead_letter(job_id)


def _expired_item(row: str) -> ExpiredItem:
    kind, tenant, item_id, rest = row.split("|", 3)
    if kind == "input":
        return ExpiredItem("input", tenant, item_id, f"inputs/{tenant}/{item_id}/{rest}", row)
    if kind == "file":
        return ExpiredItem("file", tenant, item_id, files.prefix(tenant, item_id), row)
    return ExpiredItem("job", tenant, item_id, f"jobs/{item_id}/", row)
