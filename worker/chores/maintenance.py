"""What workers do for each other's jobs, done also while none of them is alive."""

from __future__ import annotations

import asyncio

import structlog

from shared.config import settings
from shared.config.settings import Settings
from shared.queue import Queue
from worker.chores import rq_queue

log = structlog.get_logger()

MOVE_ON = "worker.chores.maintenance.move_on"
RECONCILE = "worker.chores.maintenance.reconcile"
AT_ONCE = 100
BUDGET_S = 0.75 * rq_queue.JOB_TIMEOUT_S


def move_on() -> int:
    """Take back jobs whose lease ran out and end those whose deadline passed; returns how many."""
    return asyncio.run(_move_on(settings.load()))


def reconcile() -> int:
    """Bring records and lines into agreement, as after a failover that lost a part; returns how much was put right."""
    return asyncio.run(_reconcile(settings.load()))


async def _reconcile(configured: Settings) -> int:
    queue = Queue.connect(configured)
    try:
        async with asyncio.timeout(BUDGET_S):
            repaired = await queue.maintenance.reconcile()
    finally:
        await queue.close()
    if repaired:
        log.warning("reconciled", repaired=repaired)
    return repaired


async def _move_on(configured: Settings) -> int:
    queue = Queue.connect(configured)
    moved = 0
    try:
        async with asyncio.timeout(BUDGET_S):
            while reclaimed := await queue.maintenance.reclaim(AT_ONCE):
                log.warning("leases_ran_out", jobs=reclaimed)
                moved += len(reclaimed)
            while expired := await queue.maintenance.expire(AT_ONCE):
                moved += expired
    finally:
        await queue.close()
    return moved
