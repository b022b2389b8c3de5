"""From pixels to a picture's file, with the job's parameters inside where its client asked for them."""

from __future__ import annotations

import asyncio
import json
import zlib
from io import BytesIO
from typing import Any

import numpy as np
import structlog
from PIL import Image, PngImagePlugin

from shared.errors import RedisUnavailable
from shared.job import Job, OutputFormat
from shared.queue import Queue
from shared.queue.previews import MAX_PREVIEW_BYTES
from worker.engine import Pixels

log = structlog.get_logger()

SOFTWARE = "fusequeue"
# Run-length only: on photographs of 1024x1024 80 ms and 2503 KB, where zlib's default search takes 125 ms for the same
# size (one core); at level 6 a flat 512x512 with faint noise takes 171 ms and 309 KB against 19 ms and 297 KB.
_PNG = {"compress_level": 1, "compress_type": zlib.Z_RLE}
_WEBP_METHOD = 2  # Pillow's default of 4 takes twice the time for the same size
_EXIF_SOFTWARE, _EXIF_FOLDER, _EXIF_USER_COMMENT = 0x0131, 0x8769, 0x9286
_PREVIEW_QUALITIES = (80, 60, 40, 20)
# EXIF holds 64 KiB in a JPEG: two texts of this length, at most four bytes a character, leave room for the rest.
_LONGEST_TEXT = 7000


def encode(pixels: np.ndarray[Any, np.dtype[np.uint8]], job: Job, index: int) -> tuple[bytes, str]:
    """Return the file of picture `index` of `job`, and its content type.

    `pixels` is height x width x 3, or x 4 with transparency, which a JPEG gets on white. Metadata is written exactly
    when `job.embed_parameters` is set.
    """
    picture = Image.fromarray(np.ascontiguousarray(pixels, dtype=np.uint8))
    parameters = parameters_of(job, index) if job.embed_parameters else None
    out = BytesIO()
    if picture.mode == "RGBA" and job.output_format is OutputFormat.JPEG:
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")
    match job.output_format:
        case OutputFormat.PNG:
            picture.save(out, "PNG", pnginfo=_png_text(parameters), **_PNG)
        case OutputFormat.JPEG:
            picture.save(out, "JPEG", quality=job.output_quality, exif=_exif(parameters))
        case OutputFormat.WEBP:
            picture.save(out, "WEBP", quality=job.output_quality, method=_WEBP_METHOD, exif=_exif(parameters))
    return out.getvalue(), job.output_format.content_type


def parameters_of(job: Job, index: int) -> str:
    """Return, as JSON, what makes picture `index` again; texts beyond `_LONGEST_TEXT` characters are cut."""
    wanted = {"model", "adapters", "width", "height", "steps", "guidance_scale", "guidance_scale_2", "scheduler"}
    wanted |= {"strength"} | ({"frames", "fps"} if job.task.makes_video else set())
    values = {
        "prompt": job.prompt[:_LONGEST_TEXT],
        "negative_prompt": job.negative_prompt[:_LONGEST_TEXT],
        "seed": job.seed_of(index),
        **job.model_dump(mode="json", include=wanted, exclude_none=True),
    }
    return json.dumps(values, ensure_ascii=False)


def _png_text(parameters: str | None) -> PngImagePlugin.PngInfo | None:
    if parameters is None:
        return None
    text = PngImagePlugin.PngInfo()
    text.add_text("Software", SOFTWARE)
    text.add_itxt("parameters", parameters)
    return text


def _exif(parameters: str | None) -> bytes:
    if parameters is None:
        return b""
    exif = Image.Exif()
    exif[_EXIF_SOFTWARE] = SOFTWARE
    # EXIF 2.3: eight bytes name the character code. JSON says nothing of byte order, so big endian as most readers do.
    exif.get_ifd(_EXIF_FOLDER)[_EXIF_USER_COMMENT] = b"UNICODE\0" + parameters.encode("utf-16-be", "replace")
    return exif.tobytes()


class PreviewPublisher:
    """Tells previews. One that cannot be told is dropped: the picture itself will come."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue

    async def tell(self, job: Job, index: int, number: int, pixels: Pixels) -> None:
        """Encode preview `number` of picture `index` and put it where it can be read."""
        data = await asyncio.to_thread(encode_preview, pixels, job.output_format.of_previews)
        try:
            await self._queue.previews.put(job.id, index, number, data)
        except RedisUnavailable as error:
            log.debug("preview_not_told", job_id=job.id, error=error.message)


def encode_preview(pixels: Pixels, kind: OutputFormat) -> bytes:
    """Return a file of at most `MAX_PREVIEW_BYTES`: at the best quality that fits, and smaller where none does."""
    picture = Image.fromarray(pixels).convert("RGB")
    while True:
        for quality in _PREVIEW_QUALITIES:
            out = BytesIO()
            picture.save(out, kind.name, quality=quality)
            if out.tell() <= MAX_PREVIEW_BYTES:
                return out.getvalue()
        picture = picture.resize((max(1, picture.width // 2), max(1, picture.height // 2)))
