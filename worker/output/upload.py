"""From pixels to an object in storage, beside the GPU thread and never on it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import structlog

from shared.errors import StorageUnavailable
from shared.job import Artifact, Job, Thumbnail
from shared.queue import Claim
from shared.runtime import metrics
from shared.storage import Storage
from worker.engine import Output
from worker.output.images import encode
from worker.output.videos import encode_video

log = structlog.get_logger()

T = TypeVar("T")
Files = dict[str, tuple[bytes, str]]  # by key: what is in it, and its content type

ENCODERS = 2
FIRST_RETRY_S = 0.2
LONGEST_RETRY_S = 10.0


class Uploader:
    """Encodes and uploads pictures and videos; while storage is down it holds them, up to `spool_bytes`.

    An upload is tried again for as long as the job is this worker's: it ends when storage answers, or when the
    run is stopped, lost or released, which cancels it. A full spool stops the claiming of new jobs.
    """

    def __init__(self, storage: Storage, spool_bytes: int) -> None:
        self._storage = storage
        self.spool_bytes = spool_bytes
        self._encoders = ThreadPoolExecutor(ENCODERS, thread_name_prefix="encode")
        self.held_bytes = 0

    @property
    def full(self) -> bool:
        return self.held_bytes >= self.spool_bytes

    async def deliver(self, claim: Claim, index: int, made: Output) -> Artifact:
        """Return the stored picture or video."""
        encode_one = self._video if made.is_video else self._picture
        encoding = encode_one(claim, index, made)
        del made  # the frames are free as soon as they are encoded
        artifact, files = await encoding
        size = sum(len(data) for data, _ in files.values())
        with self._holding(size), metrics.upload_seconds.time():
            for key, (data, content_type) in files.items():
                await self._put(key, data, content_type)
        return artifact

    async def _picture(self, claim: Claim, index: int, made: Output) -> tuple[Artifact, Files]:
        job, flagged = claim.job, made.flagged
        height, width = made.pixels.shape[:2]
        with self._holding(made.nbytes):
            data, content_type = await self._run(partial(encode, made.pixels, job, index))
        key = object_key(job, claim.attempt, index)
        artifact = Artifact(
            index=index,
            key=key,
            content_type=content_type,
            bytes=len(data),
            width=width,
            height=height,
            seed=job.seed_of(index),
            flagged=flagged,
        )
        return artifact, {key: (data, content_type)}

    async def _video(self, claim: Claim, index: int, made: Output) -> tuple[Artifact, Files]:
        job, flagged = claim.job, made.flagged
        with self._holding(made.nbytes):
            video = await self._run(partial(encode_video, made, job, index))
        key, content_type = object_key(job, claim.attempt, index), job.output_format.content_type
        width, height = video.thumbnail_size
        thumbnail = Thumbnail(
            key=f"{key.rpartition('.')[0]}-thumbnail.jpg",
            content_type="image/jpeg",
            bytes=len(video.thumbnail),
            width=width,
            height=height,
        )
        artifact = Artifact(
            index=index,
            kind="video",
            key=key,
            content_type=content_type,
            bytes=len(video.data),
            width=video.width,
            height=video.height,
            seed=job.seed_of(index),
            flagged=flagged,
            frames=video.frames,
            fps=video.fps,
            duration_s=video.duration_s,
            has_audio=video.has_audio,
            thumbnail=thumbnail,
        )
        files = {key: (video.data, content_type), thumbnail.key: (video.thumbnail, thumbnail.content_type)}
        return artifact, files

    async def _run(self, work: Callable[[], T]) -> T:
        def timed() -> T:
            with metrics.encode_seconds.time():
                return work()

        return await asyncio.get_running_loop().run_in_executor(self._encoders, timed)

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
    """Return where a result is stored: below its job and attempt, so that two attempts never meet."""
    return f"{attempt_prefix(job, attempt)}{index}.{job.output_format.value}"


def attempt_prefix(job: Job, attempt: int) -> str:
    """Return what the keys of all that one attempt stores begin with."""
    return f"jobs/{job.id}/{attempt}/"
