"""Maintenance chores: deleting expired objects, expired leases and deadlines, and repairing the queue.

Retention deletes from storage first, then from Redis: when a sweep is killed in between, the row in Redis remains and
the next sweep completes it. It deletes a job's whole prefix, including files of unfinished attempts.
"""

import asyncio
import time
from dataclasses import dataclass

import structlog

from api.chores import rq_queue
from api.chores.rq_queue import ChoreQueue
from shared.config import settings
from shared.config.settings import Settings
from shared.errors import StorageUnavailable
from shared.queue import ExpiredItem, Queue
from shared.storage import Storage, connect

log = structlog.get_logger()

CHUNK_ROWS = 100
CONCURRENCY = 8
FAILED_MS = 600_000
"""Until an object that could not be deleted is tried again: in each sweep it would be the first."""

RECONCILE_BUDGET_S = 0.75 * rq_queue.BUDGET_S
"""A reconcile ends itself before its chore's time is over."""


@dataclass(frozen=True)
class SweepResult:
    """Rows removed and failed, and whether more rows are due."""

    removed: int
    failed: int
    more: bool


def sweep(chain: str, chunk: int, until_s: float) -> int:
    """Remove one chunk of expired objects and return its size; enqueues the next chunk if there is one.

    The chain of chunks ends at `until_s` (epoch seconds), when the schedule starts the next chain.
    """
    configured = settings.load()
    result = asyncio.run(_sweep(configured))
    if result.more:
        _continue_chain(configured, rq_queue.SWEEP, chain, chunk, until_s)
    return result.removed


def _continue_chain(configured: Settings, chore: str, chain: str, chunk: int, until_s: float) -> None:
    """Enqueue the next chunk of a chore, unless the schedule has started the next chain."""
    if time.time() < until_s:
        queue = rq_queue.rq_queue(configured, rq_queue.kept_connection(configured), ChoreQueue.UPKEEP)
        chore_id = f"{chain}-{chunk + 1}"
        rq_queue.enqueue(queue, chore, chain, chunk + 1, until_s, chore_id=chore_id, start_within_s=60)


def sweep_without_rq(configured: Settings) -> int:
    """Remove expired objects without rq, whose writes a full Redis refuses; returns their number."""
    removed, until_s = 0, time.monotonic() + rq_queue.BUDGET_S
    while time.monotonic() < until_s:
        result = asyncio.run(_sweep(configured))
        removed += result.removed
        if not result.more:
            break
    return removed


async def _sweep(configured: Settings) -> SweepResult:
    storage = connect(configured)
    try:
        async with rq_queue.job_queue(configured) as queue:
            await storage.check(writes=False)
            result = await sweep_chunk(queue, storage)
            await queue.maintenance.note_chore("sweep")
            return result
    finally:
        await storage.close()


async def sweep_chunk(queue: Queue, storage: Storage, rows: int = CHUNK_ROWS) -> SweepResult:
    """Remove up to `rows` expired objects; raises when storage is unavailable.

    Objects that cannot be deleted do not block the others: they are tried again later.
    """
    due = await queue.maintenance.expired_items(rows)
    removed = failed = 0
    for start in range(0, len(due), CONCURRENCY):
        group = due[start : start + CONCURRENCY]
        outcomes = await asyncio.gather(*(_remove(queue, storage, item) for item in group), return_exceptions=True)
        failures = [(item, error) for item, error in zip(group, outcomes, strict=True) if error is not None]
        if len(failures) == len(group):
            await storage.check()  # raises in an outage
        for item, error in failures:
            if not isinstance(error, StorageUnavailable):
                raise error
            log.warning("retention_delete_failed", prefix=item.prefix, error=error.message)
            await queue.maintenance.postpone_item(item, FAILED_MS)
        removed += len(group) - len(failures)
        failed += len(failures)
    if due:
        log.info("retention_swept", removed=removed, failed=failed)
    return SweepResult(removed, failed, more=len(due) == rows and removed > 0)


async def _remove(queue: Queue, storage: Storage, item: ExpiredItem) -> None:
    try:
        await storage.delete_prefix(item.prefix)
    except ValueError:
        log.exception("retention_row_invalid", row=item.row)  # the key cannot hold objects: not retried forever
    await queue.maintenance.forget_item(item)


def move_on() -> int:
    """Reclaim jobs whose lease expired, end queued jobs that cannot meet their deadline; returns their number."""
    return asyncio.run(_move_on(settings.load()))


async def _move_on(configured: Settings) -> int:
    moved = 0
    async with rq_queue.job_queue(configured) as queue:
        while reclaimed := await queue.maintenance.reclaim(CHUNK_ROWS):
            log.warning("leases_expired", jobs=reclaimed)
            moved += len(reclaimed)
        moved += await queue.maintenance.expire(CHUNK_ROWS)
        await queue.maintenance.note_chore("move-on")
    return moved


def reconcile(chain: str, chunk: int, until_s: float) -> int:
    """Repair the queue after data loss, such as a failover; returns the number of repairs.

    A run that uses up its time is continued by another, as the chunks of a sweep are.
    """
    configured = settings.load()
    repaired, unfinished = asyncio.run(_reconcile(configured))
    if unfinished:
        _continue_chain(configured, rq_queue.RECONCILE, chain, chunk, until_s)
    return repaired


async def _reconcile(configured: Settings) -> tuple[int, bool]:
    async with rq_queue.job_queue(configured) as queue:
        repaired = await queue.maintenance.reconcile(RECONCILE_BUDGET_S)
        unfinished = await queue.maintenance.reconcile_unfinished()
        await queue.maintenance.note_chore("reconcile")
    if repaired:
        log.warning("queue_reconciled", repaired=repaired)
    return repaired, unfinished
