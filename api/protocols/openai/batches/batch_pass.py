"""Batches: one pass over the due ones, in turns of tenants, several at a time so that a slow step delays no other."""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace

import structlog

from api.background import Background, stopping
from api.learned_models import LearnedModels
from api.protocols.openai.batches.batch_failures import record_failure
from api.protocols.openai.batches.batch_files import BatchContext
from api.protocols.openai.batches.batch_runner import BatchRunner
from api.protocols.openai.batches.batch_steps import BatchStep, next_step
from shared.batch import Batch
from shared.config import models_file
from shared.config.models_watch import ModelsWatch
from shared.config.settings import Settings
from shared.errors import NotFound, Unavailable
from shared.queue import Queue
from shared.runtime.asyncio_tools import cancel_and_wait
from shared.runtime.clock import SyncedClock, now_ms
from shared.storage import connect

log = structlog.get_logger()

PLACES = 4
"""Steps at a time; a tenant takes one while it holds fewer than are free: two of them."""

BUDGET_S = 25.0
"""A pass ends after this time, well before rq interrupts it."""

STALE_MS = 15_000
"""Time until a step of a killed process is begun again."""

_RENEW_S = 5.0


def advance() -> int:
    """Run one pass and return the number of steps."""
    return BACKGROUND.run()


@contextlib.asynccontextmanager
async def opened(configured: Settings) -> AsyncIterator["BatchPass"]:
    """Open what steps need; at the end, wait for those in progress."""
    catalog = models_file.load(configured.models, configured.batch_rules)
    queue, storage = Queue.connect(configured), connect(configured)
    watch = ModelsWatch(configured.models, configured.batch_rules)
    batches = BatchPass(BatchContext(configured, catalog, queue, storage, SyncedClock(now_ms())), watch)
    try:
        yield batches
    finally:
        await batches.drain()
        await storage.close()
        await queue.close()


BACKGROUND = Background(opened)


class BatchPass:
    """Passes that follow each other; steps in progress at the end of one continue."""

    def __init__(self, context: BatchContext, watch: ModelsWatch | None = None) -> None:
        self._context = context
        self._watch = watch
        self._batches = context.queue.batches
        self._learned_models = LearnedModels(context.catalog, context.queue)
        self._running: dict[asyncio.Task[None], tuple[str, str]] = {}

    async def run(self) -> int:
        """Begin steps until none is due or in progress, or `BUDGET_S` is over; returns their number."""
        await self._context.queue.policies.load()  # steps read some; another thread announces this process' own
        if self._watch is not None and (models := await self._watch.poll()) is not None:
            self._context.catalog.replace(models)
        await self._learned_models.refresh()
        steps = 0
        until_s = time.monotonic() + BUDGET_S
        while time.monotonic() < until_s and not stopping.is_set():
            due = await self._due()
            for tenant, batch_id in due:
                self._running[asyncio.create_task(self._step(tenant, batch_id))] = (tenant, batch_id)
            steps += len(due)
            if not self._running:
                break
            await self._wait(0.5)
        await self._context.queue.maintenance.note_chore("advance")
        return steps

    async def drain(self) -> None:
        """Wait for the steps in progress."""
        while self._running:
            await self._wait(_RENEW_S)

    async def _due(self) -> list[tuple[str, str]]:
        if len(self._running) == PLACES:
            return []
        return await self._batches.due(PLACES, Counter(tenant for tenant, _ in self._running.values()), STALE_MS)

    async def _wait(self, timeout_s: float) -> None:
        """Wait for a step to end."""
        done, _ = await asyncio.wait(self._running, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            del self._running[task]

    async def _step(self, tenant: str, batch_id: str) -> None:
        """Run one step; one that fails is begun again, some times, and stops no other batch."""
        renewing = asyncio.create_task(self._keep(tenant, batch_id))
        try:
            batch = await self._batches.get(tenant, batch_id)
            context = replace(self._context, clock=SyncedClock(await self._context.queue.now_ms()))
            await self._advance(context, batch)
        except (NotFound, Unavailable) as error:
            log.warning("batch_step_failed", batch_id=batch_id, code=error.code, error=error.message)
        except Exception:
            log.exception("batch_step_failed", batch_id=batch_id)
        finally:
            await cancel_and_wait((renewing,))

    async def _advance(self, context: BatchContext, batch: Batch) -> None:
        waits = next_step(batch, context.clock.now_ms()) is BatchStep.WAIT
        try:
            await BatchRunner(context, batch).advance()
        except Exception as error:
            await record_failure(context, batch, error)
            raise
        facts = {"batch_id": batch.id, "status": batch.status.value, "read": batch.read, "written": batch.written}
        log.log(logging.DEBUG if waits else logging.INFO, "batch_advanced", **facts)

    async def _keep(self, tenant: str, batch_id: str) -> None:
        """Keep a batch from being due while its step is in progress."""
        while True:
            await asyncio.sleep(_RENEW_S)
            with contextlib.suppress(Unavailable):
                await self._batches.postpone(tenant, batch_id, STALE_MS)
