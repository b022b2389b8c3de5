"""Whether Redis and the storage can be used, as `/readyz` returns it without a key."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable

import structlog

from shared.errors import FusequeueError
from shared.queue import Queue
from shared.storage import Storage

log = structlog.get_logger()

CHECK_TIMEOUT_S = 5.0
CHECK_EVERY_S = 1.0
"""A check asks Redis and the storage: anyone can request it, so that all requests of a second share one."""


class Readiness:
    """Checks both at most once a second and process."""

    def __init__(self, queue: Queue, storage: Storage) -> None:
        self._queue = queue
        self._storage = storage
        self._checking: asyncio.Task[list[str]] | None = None
        self._began_s = 0.0

    async def faults(self) -> list[str]:
        """Return the faults by part and kind, without addresses or paths; the log has these."""
        if self._checking is None or (self._checking.done() and time.monotonic() - self._began_s >= CHECK_EVERY_S):
            self._began_s = time.monotonic()
            self._checking = asyncio.create_task(self._check())
        return await asyncio.shield(self._checking)

    async def close(self) -> None:
        """Wait for the check that runs."""
        if self._checking is not None:
            await asyncio.wait([self._checking])

    async def _check(self) -> list[str]:
        faults = await asyncio.gather(_fault("redis", self._queue.check()), _fault("storage", self._storage.check()))
        return [fault for fault in faults if fault is not None]


async def _fault(part: str, check: Awaitable[None]) -> str | None:
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            await check
    except FusequeueError as error:
        log.warning("readiness_check_failed", part=part, code=error.code, reason=error.message)
        return error.public
    except TimeoutError:
        return f"{part}: no response within {CHECK_TIMEOUT_S:.0f} s"
    return None
