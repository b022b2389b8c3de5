"""Removing what has outlived its retention: from storage first, then from Redis.

Whatever is killed in between, the row in Redis is still there and the next sweep finds nothing left to remove but
the row. All below a job's prefix goes, so also what an attempt left that nobody points to.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import structlog

from shared.config import settings
from shared.config.settings import Settings
from shared.errors import StorageUnavailable
from shared.queue import ExpiredItem, Queue
from shared.storage import Storage, connect
from worker.chores import rq_queue

log = structlog.get_logger()

SWEEP = "worker.chores.retention.sweep"
ROWS_A_PIECE = 100
ROWS_AT_ONCE = 8
BUDGET_S = 0.75 * rq_queue.JOB_TIMEOUT_S  # ends before rq would raise into the middle of it


@dataclass(frozen=True)
class Swept:
    """What one piece did: rows removed, rows that storage would not remove, and whether more are due."""

    removed: int
    failed: int
    more: bool


def sweep(chain: str, piece: int, until_s: float) -> int:
    """Remove one piece of what is due, enqueue the next where there is more, and return how many rows went.

    `until_s`, in seconds since the epoch, ends the chain of pieces: by then the schedule has begun another.
    """
    configured = settings.load()
    swept = asyncio.run(_sweep(configured))
    if swept.more and time.time() < until_s:
        with rq_queue.connect(configured) as connection:
            queue = rq_queue.line(configured, connection)
            rq_queue.put(queue, SWEEP, chain, piece + 1, until_s, chore_id=f"{chain}-{piece + 1}", start_within_s=60)
    return swept.removed


async def _sweep(configured: Settings) -> Swept:
    queue, storage = Queue.connect(configured), connect(configured)
    try:
        async with asyncio.timeout(BUDGET_S):
            await storage.check()
            return await sweep_piece(queue, storage)
    finally:
        await storage.close()
        await queue.close()


async def sweep_piece(queue: Queue, storage: Storage, rows: int = ROWS_A_PIECE) -> Swept:
    """Remove up to `rows` jobs and inputs whose time is over; raises `StorageUnavailable` where storage fails all."""
    due = await queue.maintenance.expired_items(rows)
    removed = failed = 0
    for start in range(0, len(due), ROWS_AT_ONCE):
        outcomes = await asyncio.gather(
            *(_remove(queue, storage, doomed) for doomed in due[start : start + ROWS_AT_ONCE]), return_exceptions=True
        )
        faults = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        removed += len(outcomes) - len(faults)
        failed += len(faults)
        for fault in faults:
            # One object that cannot be removed must not keep the others; a storage that is down fails them all.
            if not isinstance(fault, StorageUnavailable) or len(faults) == len(outcomes):
                raise fault
            log.warning("retention_not_removed", error=fault.message)
    if due:
        log.info("retention_swept", removed=removed, failed=failed)
    return Swept(removed, failed, more=len(due) == rows and removed > 0)


async def _remove(queue: Queue, storage: Storage, doomed: ExpiredItem) -> None:
    try:
        await storage.delete_prefix(doomed.prefix)
    except ValueError:
        # No object can be below what is no key: a row that a bug or a person wrote, and would be retried for ever.
        log.exception("retention_row_unreadable", row=doomed.row)
    await queue.maintenance.forget_item(doomed)
