"""From pixels to an object in storage, beside the GPU thread and never on it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import structlog

from shared.errors import StorageUnavailable
from shared.job import Artifact, Job
from shared.queue import Claim
from shared.storage import Storage
from worker.encode import encode
from worker.engine import Made

log = structlog.get_logger()

ENCODERS = 2
FIRST_RETRY_S = 0.2
LONGEST_RETRY_S = 10.0


class Delivery:
    """Encodes and uploads pictures; while storage is down it holds them, up to `spool_bytes`.

    An upload is tried again for as long as the job is this worker's: it ends when storage answers, or when the
    run is stopped, lost or released, which cancels it. A full spool stops the claiming of new jobs.
    """

    def __init__(self, storage: Storage, spool_bytes: int) -> None:
        self._storage = storage
        self._spool_bytes = spool_bytes
        self._encoders = ThreadPoolExecutor(ENCODERS, thread_name_prefix="encode")
        self.held_bytes = 0

    @property
    def full(self) -> bool:
        return self.held_bytes >= self._spool_bytes

    async def deliver(self, claim: Claim, index: int, made: Made) -> Artifact:
        """Return the stored picture."""
        pixels, flagged = made.pixels, made.flagged
        del made
        height, width = pixels.shape[:2]
        with self._holding(pixels.nbytes):
            loop = asyncio.get_running_loop()
            data, content_type = await loop.run_in_executor(self._encoders, encode, pixels, claim.job, index)
        del pixels
        key = object_key(claim.job, claim.attempt, index)
        with self._holding(len(data)):
            await self._put(key, data, content_type)
        return Artifact(
            index=index,
            key=key,
            content_type=content_type,
            bytes=len(data),
            width=width,
            height=height,
            seed=claim.job.seed + index // max(1, claim.job.layers),
            flagged=flagged,
        )

    @contextmanager
    def _holding(self, size: int) -> Iterator[None]:
        self.held_bytes += size
        try:
            yield
        finally:
            self.held_bytes -= size

    async def _put(self, key: str, data: bytes, content_type: str) -> None:
        ceiling = FIRST_RETRY_S
        while True:
            try:
                return await self._storage.put(key, data, content_type)
            except StorageUnavailable as error:
                log.warning("upload_waits_for_storage", key=key, error=error.message, held_bytes=self.held_bytes)
            await asyncio.sleep(random.uniform(ceiling / 2, ceiling))
            ceiling = min(2 * ceiling, LONGEST_RETRY_S)

    def close(self) -> None:
        self._encoders.shutdown(wait=False, cancel_futures=True)


def object_key(job: Job, attempt: int, index: int) -> str:
    """Return where a picture is stored: below its job and attempt, so that two attempts never meet."""
    return f"jobs/{job.id}/{attempt}/{index}.{job.output_format.value}"
