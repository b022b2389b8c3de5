"""Chores of upkeep: retention, expired leases and deadlines, and repairs of the queue."""

import asyncio
import time

import structlog

from api.chores import retention, rq_queue
from api.chores.rq_queue import ChoreQueue
from shared.config import settings
from shared.config.settings import Settings

log = structlog.get_logger()

JOBS_AT_ONCE = 100
"""Jobs that one script moves on."""

RECONCILE_BUDGET_S = 0.75 * rq_queue.BUDGET_S
"""A reconcile ends itself before its chore's time is over."""


def sweep(chain: str, chunk: int, until_s: float) -> int:
    """Remove expired objects for a while and return their number; enqueues the next chunk if there were some.

    The chain of chunks ends at `until_s` (epoch seconds), when the schedule starts the next chain.
    """
    removed = retention.BACKGROUND.run()
    if removed:
        _continue_chain(settings.load(), rq_queue.SWEEP, chain, chunk, until_s)
    return removed


def _continue_chain(configured: Settings, chore: str, chain: str, chunk: int, until_s: float) -> None:
    """Enqueue the next chunk of a chore, unless the schedule has started the next chain."""
    if time.time() < until_s:
        queue = rq_queue.rq_queue(configured, rq_queue.kept_connection(configured), ChoreQueue.UPKEEP)
        chore_id = f"{chain}-{chunk + 1}"
        rq_queue.enqueue(queue, chore, chain, chunk + 1, until_s, chore_id=chore_id, start_within_s=60)


def sweep_without_rq(configured: Settings) -> int:
    """Remove expired objects without rq, whose writes a full Redis refuses; returns their number."""

    async def run() -> int:
        async with retention.opened(configured) as sweeps:
            return await sweeps.run(rq_queue.BUDGET_S / 2)

    return asyncio.run(run())


def move_on() -> int:
    """Reclaim jobs whose lease expired, end queued jobs that cannot meet their deadline, and queue those for later that
    are due; returns their number."""
    return asyncio.run(_move_on(settings.load()))


async def _move_on(configured: Settings) -> int:
    moved = 0
    async with rq_queue.job_queue(configured) as queue:
        while reclaimed := await queue.maintenance.reclaim(JOBS_AT_ONCE):
            log.warning("leases_expired", jobs=reclaimed)
            moved += len(reclaimed)
        moved += await queue.maintenance.expire(JOBS_AT_ONCE)
        moved += await queue.maintenance.queue_due(rq_queue.BUDGET_S / 2)
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
