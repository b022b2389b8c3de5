"""What a worker's gauges show at a scrape: its spool, its seats, its GPU thread's time, and the GPU as NVML sees it."""

from __future__ import annotations

import asyncio

import structlog

from shared.runtime import metrics
from worker.batch_log import BatchLog
from worker.engine import EngineStatus
from worker.metrics.collectors import Spent
from worker.metrics.nvml import Card
from worker.output.upload import Uploader

log = structlog.get_logger()

NVML_S = 2.0


class Gauges:
    """Brings them up to date when asked to."""

    def __init__(self, delivery: Uploader, batches: BatchLog) -> None:
        self._delivery = delivery
        self._batches = batches
        self._spent = Spent()
        self._card: Card | None = None
        self._looked = False

    async def refresh(self, engine: EngineStatus, *, ready: bool) -> None:
        """Set the gauges, and count what the GPU thread has done since the last call."""
        self._spent.show(engine.thread_time)
        metrics.spool_bytes.set(self._delivery.held_bytes)
        metrics.spool_limit_bytes.set(self._delivery.spool_bytes)
        metrics.running_slots.set(self._batches.seats)
        metrics.worker_ready.set(ready)
        if engine.device_uuid is not None and not self._looked:
            self._looked = True
            self._card = Card.find(engine.device_uuid)
        if self._card is not None:
            await self._read(self._card)

    async def _read(self, card: Card) -> None:
        try:
            async with asyncio.timeout(NVML_S):
                facts = await asyncio.to_thread(card.read)
        except TimeoutError:
            log.warning("nvml_silent", timeout_s=NVML_S, remedy="it is not asked again")
            self._card = None
            return
        if facts is not None:
            used, total, share = facts
            metrics.gpu_memory_bytes.labels("used").set(used)
            metrics.gpu_memory_bytes.labels("total").set(total)
            if share is not None:
                metrics.gpu_utilisation.set(share)
