"""Maintenance: lost workers, deadlines, retention, and repair after a failover."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import Literal

from shared.protocols.openai import files
from shared.queue.client import QueueComponent, translated
from shared.queue.records import ExpiredItem

_SCAN_COUNT = 1000
_REPAIRED_AT_ONCE = 50


class Maintenance(QueueComponent):
    async def reclaim(self, limit: int = 100) -> list[str]:
        """Take back up to `limit` jobs whose lease ran out, and return their ids.

        Each goes to the front of its line, to run alone. A loss while alone counts as the job's own; at `max_attempts`
        of these the job fails with code `worker_lost` and goes to the dead letters.
        """
        return await self._scripts.reclaim(limit)

    async def expire(self, limit: int = 100) -> int:
        """End up to `limit` waiting jobs whose deadline has passed; returns how many."""
        return await self._scripts.expire(limit)

    async def pending_work(self) -> tuple[bool, bool]:
        """Return whether there are webhooks to deliver, now or later, and whether batches are under way."""
        with translated():
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.exists(self._keys.webhook_outbox, self._keys.webhook_hosts)
                pipe.exists(self._keys.active_batches)
                hooks, batches = await pipe.execute()
        return bool(hooks), bool(batches)

    async def expired_items(self, limit: int = 100) -> list[ExpiredItem]:
        """Return what has outlived its retention. Remove it from storage, then hand it to `retained`."""
        rows = await self._scripts.expired_items(limit)
        return [_doomed(row) for row in rows]

    async def forget_item(self, doomed: ExpiredItem) -> None:
        """Forget what storage does not hold any more: its row, record and indexes."""
        await self._scripts.forget_item(doomed.row)

    async def reconcile(self) -> int:
        """Bring jobs, lanes and counters into agreement again, as after a failover; returns how much was put right.

        Meant for a chore. It walks all keys of the namespace in small scripts, while others work on; where several do
        so at once, one does it and the others return 0.
        """
        token = secrets.token_hex(8)
        with translated():
            if not await self._redis.set(self._keys.reconciling, token, nx=True, ex=60):
                return 0
        try:
            repaired = await self._each("job", self._scripts.reconcile_jobs)
            repaired += await self._each("lane", self._scripts.reconcile_lanes)
            repaired += await self._each("signature", self._scripts.reconcile_signatures)
            repaired += await self._scripts.reconcile_running_slots()
            return repaired + await self._scripts.reconcile_queued_jobs()
        finally:
            with translated():
                if await self._redis.get(self._keys.reconciling) == token:
                    await self._redis.delete(self._keys.reconciling)

    async def _each(self, kind: Literal["job", "lane", "signature"], script: Callable[..., Awaitable[int]]) -> int:
        prefix = f"{self._keys.prefix}{kind}:"
        pattern = "".join(f"\\{char}" if char in "*?[]\\" else char for char in prefix) + "*"
        repaired, cursor = 0, 0
        while True:
            with translated():
                cursor, names = await self._redis.scan(cursor, match=pattern, count=_SCAN_COUNT)
            ids = [name.removeprefix(prefix) for name in names]
            for first in range(0, len(ids), _REPAIRED_AT_ONCE):
                repaired += await script(*ids[first : first + _REPAIRED_AT_ONCE])
                await asyncio.sleep(0)
            if int(cursor) == 0:
                return repaired


def _doomed(row: str) -> ExpiredItem:
    kind, tenant, name, rest = row.split("|", 3)
    if kind == "input":
        return ExpiredItem(kind="input", tenant=tenant, id=name, prefix=f"inputs/{tenant}/{name}/{rest}", row=row)
    if kind == "file":
        return ExpiredItem(kind="file", tenant=tenant, id=name, prefix=files.prefix(tenant, name), row=row)
    return ExpiredItem(kind="job", tenant=tenant, id=name, prefix=f"jobs/{name}/", row=row)
