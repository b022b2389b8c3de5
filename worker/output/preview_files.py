"""From a preview's pixels to a small file that whoever waits for the job can read for a while."""

from __future__ import annotations

import asyncio
from io import BytesIO

import structlog
from PIL import Image

from shared.errors import RedisUnavailable
from shared.job import Job, OutputFormat
from shared.queue import Queue
from shared.queue.previews import MAX_PREVIEW_BYTES
from worker.engine import Pixels

log = structlog.get_logger()

_QUALITIES = (80, 60, 40, 20)


class PreviewPublisher:
    """Tells previews. One that cannot be told is dropped: the picture itself will come."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue

    async def tell(self, job: Job, index: int, number: int, pixels: Pixels) -> None:
        """Encode preview `number` of picture `index` and put it where it can be read."""
        data = await asyncio.to_thread(encode_preview, pixels, job.output_format.of_previews)
        try:
            await self._queue.put_preview(job.id, index, number, data)
        except RedisUnavailable as error:
            log.debug("preview_not_told", job_id=job.id, error=error.message)


def encode_preview(pixels: Pixels, kind: OutputFormat) -> bytes:
    """Return a file of at most `MAX_PREVIEW_BYTES`: at the best quality that fits, and smaller where none does."""
    picture = Image.fromarray(pixels).convert("RGB")
    while True:
        for quality in _QUALITIES:
            out = BytesIO()
            picture.save(out, kind.name, quality=quality)
            if out.tell() <= MAX_PREVIEW_BYTES:
                return out.getvalue()
        picture = picture.resize((max(1, picture.width // 2), max(1, picture.height // 2)))
