"""Checkpoints of claimed jobs: stored in the background, named in the job's record, and read by the next claim."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from functools import partial

import structlog

from shared.errors import NotFound, StorageRefused, Unavailable
from shared.queue import Claim, Queue
from shared.queue.checkpoints import JobCheckpoint, StoredImage, checkpoint_key
from shared.runtime import metrics
from shared.runtime.asyncio_tools import retry_while_unavailable
from shared.storage import Storage
from worker.claims.claimed_job import ClaimedJob
from worker.engine.protocol import CheckpointTaken, ImageCheckpoint, JobFinished

log = structlog.get_logger()

MAX_JOB_BYTES = 512 * 1024 * 1024  # of all images of a job: a video of 81 frames of 1280 x 720 has 77 MB
READ_S = 30.0
NAME_S = 10.0
REFUSALS = {
    "stale": "the claim is stale",
    "full": "the checkpoints of all tenants have FUSEQUEUE_MAX_CHECKPOINT_BYTES",
}
CONTENT_TYPE = "application/safetensors"

for _reason in ("stored", "read", "resume"):
    metrics.checkpoints_refused.labels(_reason)  # from 0 on


class CheckpointStore:
    """Any failure costs steps only: the job keeps its earlier checkpoint, or begins anew."""

    def __init__(self, queue: Queue, storage: Storage, worker: str) -> None:
        self._queue = queue
        self._storage = storage
        self.worker = worker
        self.last_s = 0.0  # what it took to store the last checkpoint

    def take(self, claimed: ClaimedJob, event: CheckpointTaken) -> None:
        """Store a checkpoint from the engine, after the one being stored, and instead of one that waits."""
        claimed.checkpoint_fault = event.reason
        if event.reason is None and any(event.images):
            claimed.waiting_checkpoint = event.images
            if claimed.storing is None or claimed.storing.done():
                claimed.storing = asyncio.create_task(self._store_waiting(claimed))

    async def read(self, claimed: ClaimedJob) -> tuple[bytes | None, ...]:
        """Return the files of a claim's checkpoint; None for one that is missing or is not what was stored."""
        if (checkpoint := claimed.claim.checkpoint) is None:
            return ()
        files = [None if image is None else await self._read(claimed, image) for image in checkpoint.images]
        images = (None if data is None else image for image, data in zip(checkpoint.images, files, strict=True))
        claimed.resumed_from = claimed.checkpoint = JobCheckpoint(images=tuple(images))
        return tuple(files)

    def note_result(self, claimed: ClaimedJob, finished: JobFinished) -> None:
        """Count whether a run has continued from the checkpoint that it was given."""
        model, given = claimed.job.model, claimed.resumed_from.step
        if finished.resumed_steps:
            log.info("job_resumed", step=finished.resumed_steps, of=given)
            metrics.checkpoints_resumed.labels(model).inc()
        elif given and finished.error is None and not finished.canceled:
            remedy = "none: it began anew, and the engine's log has the reason"
            log.warning("job_not_resumed", step=given, remedy=remedy)
            metrics.checkpoints_refused.labels("resume").inc()

    async def _read(self, claimed: ClaimedJob, image: StoredImage) -> bytes | None:
        try:
            async with asyncio.timeout(READ_S):
                read = partial(self._storage.read, image.key, 0, image.bytes + 1)
                data = await retry_while_unavailable(read, "checkpoint_read_failed", until=claimed.stopped.is_set)
        except (NotFound, StorageRefused, TimeoutError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
        else:
            if data is not None and await asyncio.to_thread(_digest, data) == image.sha256:
                return data
            reason = "it is not the file that was stored"
        log.warning("checkpoint_not_read", key=image.key, reason=reason, remedy="none: its image begins anew")
        metrics.checkpoints_refused.labels("read").inc()
        return None

    async def _store_waiting(self, claimed: ClaimedJob) -> None:
        while (images := claimed.waiting_checkpoint) is not None:
            claimed.waiting_checkpoint = None
            try:
                reason = await self._store(claimed, images)
            except (Unavailable, StorageRefused, TimeoutError) as error:
                reason = f"{type(error).__name__}: {error}"
            except Exception as error:  # the job must not end with it
                log.exception("checkpoint_store_failed", job_id=claimed.job.id)
                reason = type(error).__name__
            claimed.checkpoint_refusal = reason
            if reason is not None:
                log.warning("checkpoint_not_stored", job_id=claimed.job.id, reason=reason)
                metrics.checkpoints_refused.labels("stored").inc()

    async def _store(self, claimed: ClaimedJob, images: Sequence[ImageCheckpoint | None]) -> str | None:
        """Store a checkpoint and name it in the record; return why not, or None."""
        size = sum(len(image.data) for image in images if image is not None)
        if size > MAX_JOB_BYTES:
            return f"it has {size} bytes, more than {MAX_JOB_BYTES}"
        started, number = time.monotonic(), claimed.next_checkpoint()
        earlier, began_with = claimed.checkpoint, claimed.resumed_from.images
        stored: list[StoredImage | None] = []
        for index, image in enumerate(images):
            if image is not None:
                stored.append(await self._put(claimed.claim, number, index, image))
            else:
                stored.append(began_with[index] if index < len(began_with) else None)
        checkpoint = JobCheckpoint(images=tuple(stored))
        until, give_up_s = claimed.stopped.is_set, time.monotonic() + NAME_S
        name = partial(self._queue.claims.keep_checkpoint, self.worker, claimed.claim, checkpoint)
        verdict = await retry_while_unavailable(
            name, "checkpoint_not_named", until=lambda: until() or time.monotonic() > give_up_s, max_s=1.0
        )
        if verdict is None:  # whether the record names it is unknown: it stays as long as the job
            return "Redis cannot be reached"
        if verdict != "kept":
            await self._delete(checkpoint, kept=earlier)
            return REFUSALS.get(verdict, f"the quota {verdict} is used up")
        claimed.checkpoint = checkpoint
        seconds = round(time.monotonic() - started, 3)
        self.last_s = seconds
        log.debug("checkpoint_stored", job_id=claimed.job.id, step=checkpoint.step, bytes=size, seconds=seconds)
        metrics.checkpoints_written.labels(claimed.job.model).inc()
        await self._delete(earlier, kept=checkpoint)
        return None

    async def _put(self, claim: Claim, number: int, index: int, image: ImageCheckpoint) -> StoredImage:
        key = checkpoint_key(claim.job.id, claim.epoch, number, index)
        digest = await asyncio.to_thread(_digest, image.data)
        await self._storage.put(key, image.data, CONTENT_TYPE)
        return StoredImage(key=key, bytes=len(image.data), sha256=digest, step=image.step, total=image.total)

    async def _delete(self, checkpoint: JobCheckpoint, kept: JobCheckpoint) -> None:
        """Delete the files of a checkpoint that another one does not name; the end of the job deletes what stays."""
        in_use = {image.key for image in kept.stored}
        for image in checkpoint.stored:
            if image.key not in in_use:
                try:
                    await self._storage.delete_prefix(image.key)
                except Unavailable as error:
                    log.warning("checkpoint_not_deleted", key=image.key, error=str(error))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
