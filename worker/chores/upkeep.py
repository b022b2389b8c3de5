"""What workers do for each other's jobs, done also while none of them is alive."""

from __future__ import annotations

import asyncio

import structlog

from shared import settings
from shared.queue import Queue
from shared.settings import Settings
from worker.chores import line

log = structlog.get_logger()

MOVE_ON = "worker.chores.upkeep.move_on"
AT_ONCE = 100
BUDGET_S = 0.75 * line.JOB_TIMEOUT_S


def move_on() -> int:
    """Take back jobs whose lease ran out and end those whose deadline passed; returns how many."""
    return asyncio.run(_move_on(settings.load()))


async def _move_on(configured: Settings) -> int:
    queue = Queue.connect(configured)
    moved = 0
    try:
        async with asyncio.timeout(BUDGET_S):
            while reclaimed := await queue.reclaim(AT_ONCE):
                log.warning("leases_ran_out", jobs=reclaimed)
                moved += len(reclaimed)
            while expired := await queue.expire(AT_ONCE):
                moved += expired
    finally:
        await queue.close()
    return moved
