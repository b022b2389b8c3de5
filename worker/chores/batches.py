"""Batches: looked at by a chore of the schedule, worked on in chores of one piece that each put the next in line."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from shared.config import models_file, settings
from shared.config.settings import Settings
from shared.errors import NotFound
from shared.protocols.openai.batches import Batch, BatchStep, next_step
from shared.queue import Queue
from shared.runtime.clock import now_ms
from shared.storage import connect
from worker.chores import rq_queue
from worker.chores.batch_work import LOOK_MS, WAIT_MS, Desk, Work

log = structlog.get_logger()

LOOK = "worker.chores.batches.look"
ADVANCE = "worker.chores.batches.advance"
AT_ONCE = 100
BUDGET_S = 0.75 * rq_queue.JOB_TIMEOUT_S


def look() -> int:
    """Begin work on the batches that are due, and return how many."""
    configured = settings.load()
    due = asyncio.run(_due(configured))
    if due:
        with rq_queue.connect(configured) as connection:
            queue = rq_queue.line(configured, connection)
            for batch in due:
                chore_id = f"{batch.id}-{batch.rev}-{secrets.token_hex(4)}"
                rq_queue.put(queue, ADVANCE, batch.tenant, batch.id, chore_id=chore_id, start_within_s=60)
    return len(due)


def advance(tenant: str, batch_id: str) -> str:
    """Do one piece of work on a batch, put the next in line where there is more, and return the batch's status."""
    configured = settings.load()
    more, batch = asyncio.run(_advance(configured, tenant, batch_id))
    if more and batch is not None:
        with rq_queue.connect(configured) as connection:
            chore_id = f"{batch_id}-{batch.rev + 1}-{secrets.token_hex(4)}"
            queue = rq_queue.line(configured, connection)
            rq_queue.put(queue, ADVANCE, tenant, batch_id, chore_id=chore_id, start_within_s=60)
    return "gone" if batch is None else batch.status.value


async def _due(configured: Settings) -> list[Batch]:
    """Return the batches about which something can be done; the others are put off."""
    queue = Queue.connect(configured)
    due = []
    try:
        async with asyncio.timeout(BUDGET_S):
            for tenant, batch_id in await queue.batches.due(AT_ONCE, LOOK_MS):
                try:
                    batch = await queue.batches.get(tenant, batch_id)
                except NotFound:
                    continue
                if next_step(batch, now_ms()) is BatchStep.WAIT:
                    await queue.batches.postpone(batch, WAIT_MS)
                else:
                    due.append(batch)
    finally:
        await queue.close()
    return due


async def _advance(configured: Settings, tenant: str, batch_id: str) -> tuple[bool, Batch | None]:
    async with desk(configured) as made, asyncio.timeout(BUDGET_S):
        try:
            batch = await made.queue.batches.get(tenant, batch_id)
        except NotFound:
            return False, None
        more = await Work(made, batch).do()
        log.info("batch_advanced", batch_id=batch_id, status=batch.status.value, read=batch.read, written=batch.written)
        return more, batch


@asynccontextmanager
async def desk(configured: Settings) -> AsyncIterator[Desk]:
    """Give what the work on batches needs."""
    queue, storage = Queue.connect(configured), connect(configured)
    try:
        yield Desk(configured, models_file.load(configured.models, configured.batch_rules), queue, storage)
    finally:
        await storage.close()
        await queue.close()
