"""Keeps the catalog up to date with what workers publish of the models that they have loaded."""

from __future__ import annotations

import asyncio
import contextlib
import time

from shared.config.catalog import Catalog
from shared.errors import Unavailable
from shared.queue import Queue

EVERY_S = 5.0
"""Least time between two reads: a model that is loaded is known so much later."""

TIMEOUT_S = 1.0


class LearnedModels:
    """Reads the facts of all models when they are asked for, and at most every few seconds."""

    def __init__(self, catalog: Catalog, queue: Queue) -> None:
        self._catalog = catalog
        self._queue = queue
        self._next_s = float("-inf")

    async def refresh(self) -> None:
        """Let the catalog learn what workers have published; without Redis it stays as it is."""
        if (now_s := time.monotonic()) < self._next_s:
            return
        self._next_s = now_s + EVERY_S
        with contextlib.suppress(Unavailable, TimeoutError):
            async with asyncio.timeout(TIMEOUT_S):
                version = self._catalog.version
                facts = await self._queue.model_facts.of(self._catalog)
                if self._catalog.version == version:  # else they are of the models before a change of the file
                    self._catalog.learn(facts)
