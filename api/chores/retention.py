"""Retention: what has expired is deleted from storage first, then from Redis.

When a sweep is killed in between, the row in Redis remains and the next sweep completes it. It deletes a job's whole
prefix, including files of unfinished attempts.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog

from api.background import Background
from api.chores import rq_queue
from shared.config.settings import Settings
from shared.errors import StorageUnavailable
from shared.queue import ExpiredItem, Queue
from shared.runtime.asyncio_tools import cancel_and_wait
from shared.storage import Storage, connect

log = structlog.get_logger()

PAGE_ROWS = 100
CONCURRENCY = 128
REQUESTS = 64
"""Deletions, and requests to storage, at a time: a request of 60 ms takes one of the process' own time. More deletions
than that: some wait for a request that they share. Not many more: each waits for a thread."""

CHUNK_S = 2.0
"""Time in which a chunk begins deletions; the chores after it wait."""

FAILED_MS = 600_000
"""Until an object that could not be deleted is tried again: in each sweep it would be the first."""

_UNEXPLAINED = 8
"""Failures until it is checked whether storage is available."""


@dataclass(frozen=True)
class SweepResult:
    """Rows removed and failed, and whether more rows are due."""

    removed: int
    failed: int
    more: bool


async def sweep_chunk(queue: Queue, storage: Storage, rows: int = PAGE_ROWS, budget_s: float = 0.0) -> SweepResult:
    """Remove expired objects for `budget_s`, at least a page of `rows`; raises when storage is unavailable.

    Objects that cannot be deleted do not block the others: they are tried again later.
    """
    sweep = _Sweep(queue, storage)
    try:
        more = await sweep.run(rows, time.monotonic() + budget_s)
    finally:
        await sweep.close()
    if sweep.removed or sweep.failed:
        log.info("retention_swept", removed=sweep.removed, failed=sweep.failed)
    return SweepResult(sweep.removed, sweep.failed, more=more and sweep.removed > 0)


class _Sweep:
    """Up to `CONCURRENCY` deletions; each that ends makes room for the next."""

    def __init__(self, queue: Queue, storage: Storage) -> None:
        self.removed = self.failed = 0
        self._queue = queue
        self._storage = storage
        self._running: dict[asyncio.Task[None], ExpiredItem] = {}
        self._failures: list[tuple[ExpiredItem, StorageUnavailable]] = []

    async def run(self, rows: int, until_s: float) -> bool:
        """Begin to remove what is due, at least `rows`, more until `until_s`; return whether more can be due."""
        begun = 0
        while page := await self._next_page(rows):
            for item in page:
                await self._wait(CONCURRENCY - 1)
                if begun >= rows and time.monotonic() >= until_s:
                    break
                self._running[asyncio.create_task(self._remove(item))] = item
                begun += 1
            if time.monotonic() >= until_s:
                break
        await self._wait(0)
        await self._postpone_failures()
        return len(page) >= rows

    async def close(self) -> None:
        """End the deletions in progress after an error."""
        await cancel_and_wait(tuple(self._running))

    async def _next_page(self, rows: int) -> list[ExpiredItem]:
        """Return items that are due and not in progress."""
        taken = {item.row for item in self._running.values()} | {item.row for item, _ in self._failures}
        due = await self._queue.maintenance.expired_items(rows + len(taken))
        return [item for item in due if item.row not in taken]

    async def _remove(self, item: ExpiredItem) -> None:
        try:
            await self._storage.delete_prefix(item.prefix)
        except ValueError:
            log.exception("retention_row_invalid", row=item.row)  # the key cannot hold objects: not retried forever
        await self._queue.maintenance.forget_item(item)

    async def _wait(self, most: int) -> None:
        """Wait until at most so many deletions are in progress."""
        while len(self._running) > most:
            ended, _ = await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                item, error = self._running.pop(task), task.exception()
                if error is None:
                    self.removed += 1
                elif isinstance(error, StorageUnavailable):
                    self._failures.append((item, error))
                else:
                    raise error
            if len(self._failures) >= _UNEXPLAINED:
                await self._postpone_failures()

    async def _postpone_failures(self) -> None:
        """Postpone what could not be deleted, or raise in an outage."""
        if self._failures:
            await self._storage.check()
        for item, error in self._failures:
            log.warning("retention_delete_failed", prefix=item.prefix, error=error.message)
            await self._queue.maintenance.postpone_item(item, FAILED_MS)
        self.failed += len(self._failures)
        self._failures.clear()


class SweepPass:
    """Sweeps of one process, with its connections to Redis and storage."""

    def __init__(self, queue: Queue, storage: Storage) -> None:
        self._queue = queue
        self._storage = storage

    async def run(self, budget_s: float | None = None) -> int:
        """Remove expired objects for `CHUNK_S`, or another time; return their number."""
        async with asyncio.timeout(rq_queue.BUDGET_S):
            await self._storage.check(writes=False)
            result = await sweep_chunk(self._queue, self._storage, budget_s=CHUNK_S if budget_s is None else budget_s)
            await self._queue.maintenance.note_chore("sweep")
        return result.removed


@asynccontextmanager
async def opened(configured: Settings) -> AsyncIterator[SweepPass]:
    """Open what sweeps need."""
    queue, storage = Queue.connect(configured), connect(configured, REQUESTS)
    try:
        yield SweepPass(queue, storage)
    finally:
        await storage.close()
        await queue.close()


BACKGROUND = Background(opened)
