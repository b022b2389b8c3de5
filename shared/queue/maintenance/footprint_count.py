"""Counting what tenants keep: unfinished jobs by their records, ended ones and inputs by retention, files by parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shared.auth import Footprint
from shared.queue.client import QueueClient, QueueComponent
from shared.queue.connections.errors import translated
from shared.queue.quotas import PART_RECORD_BYTES

NAMES = tuple(Footprint.__dataclass_fields__)
CHECKPOINT_BYTES = "checkpoint_bytes"
_ROWS = 1000

Scan = Callable[[Any], AsyncIterator[tuple[list[str], str]]]
"""Yields pages of the ids of all keys of a kind."""


@dataclass
class FootprintCount:
    """What was counted, by name and tenant, with `*` for all tenants; the bytes of checkpoints for all only."""

    totals: dict[str, Counter[str]] = field(
        default_factory=lambda: {name: Counter() for name in (*NAMES, CHECKPOINT_BYTES)}
    )

    def add(self, tenant: str, size: Sequence[int]) -> None:
        for name, number in zip(NAMES, size, strict=True):
            self.totals[name][tenant] += number
            self.totals[name]["*"] += number

    def add_checkpoint(self, size: str | None) -> None:
        if size:
            self.totals[CHECKPOINT_BYTES]["*"] += _numbers(size)[-1]


class FootprintCounter(QueueComponent):
    """Counts in pages; `extend` is called before each, and keeps the recount in progress."""

    def __init__(self, client: QueueClient, scan: Scan, extend: Callable[[], Awaitable[None]]) -> None:
        super().__init__(client)
        self._scan, self._extend = scan, extend
        self._count = FootprintCount()
        self._unfinished: set[str] = set()

    async def count(self) -> FootprintCount:
        # Unfinished jobs first: one that ends meanwhile has a row then, and is counted once.
        await self._count_unfinished()
        await self._count_retained()
        await self._count_files()
        return self._count

    async def _count_unfinished(self) -> None:
        async for names, _ in self._scan("job"):
            await self._extend()
            with translated():
                async with self._redis.pipeline(transaction=False) as pipe:
                    for job_id in names:
                        pipe.hmget(self._keys.job(job_id), "state", "tenant", "size", "checkpoint_size")
                    rows = await pipe.execute()
            for job_id, (state, tenant, size, checkpoint_size) in zip(names, rows, strict=True):
                if state in ("queued", "running") and size and job_id not in self._unfinished:
                    self._unfinished.add(job_id)
                    self._count.add(tenant, _numbers(size))
                    self._count.add_checkpoint(checkpoint_size)

    async def _count_retained(self) -> None:
        cursor = 0
        while True:
            await self._extend()
            with translated():
                cursor, rows = await self._redis.zscan(self._keys.retention, cursor, count=_ROWS)
            for row, _ in rows:
                kind, tenant, item_id, _, *size = row.split("|")
                if kind != "file" and any(size) and item_id not in self._unfinished:
                    self._count.add(tenant, _numbers(size[0]))
            if not int(cursor):
                return

    async def _count_files(self) -> None:
        seen: set[str] = set()  # a scan can return a key twice
        async for names, _ in self._scan("file_parts"):
            await self._extend()
            new = [name for name in dict.fromkeys(names) if name not in seen]
            seen.update(new)
            with translated():
                async with self._redis.pipeline(transaction=False) as pipe:
                    for name in new:
                        pipe.lrange(self._keys.file_parts(*name.split("|")), 0, -1)
                    lists = await pipe.execute()
            for name, parts in zip(new, lists, strict=True):
                stored = sum(int(part.partition(" ")[0]) for part in parts)
                self._count.add(name.partition("|")[0], (0, PART_RECORD_BYTES * len(parts), len(parts), stored))


def _numbers(size: str) -> list[int]:
    return [int(number) for number in size.split(",")]
