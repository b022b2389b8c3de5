"""Files of images and latents with optional embedded job parameters, and preview files."""

import asyncio
import json
import zlib
from bisect import bisect_right
from io import BytesIO

import numpy as np
import structlog
from PIL import Image, PngImagePlugin

from shared.errors import RedisUnavailable
from shared.inputs.formats.latents import file_of
from shared.job import Job
from shared.job_fields import CallFields, ChosenFields, PipelineFields
from shared.queue import Claim, Queue
from shared.queue.workers.previews import MAX_PREVIEW_BYTES
from shared.tasks import OutputFormat
from worker.engine.outputs import Latents, Pixels

log = structlog.get_logger()

SOFTWARE = "fusequeue"
# Run-length only: 1024x1024 photographs take 80 ms and 2503 KB, with zlib's default search 125 ms for the same size
# (one core); at level 6 a flat 512x512 image with faint noise takes 171 ms and 309 KB instead of 19 ms and 297 KB.
_PNG = {"compress_level": 1, "compress_type": zlib.Z_RLE}
_WEBP_METHOD = 2  # Pillow's default of 4 takes twice the time for the same size
_EXIF_SOFTWARE, _EXIF_FOLDER, _EXIF_USER_COMMENT = 0x0131, 0x8769, 0x9286
# EXIF holds 64 KiB in a JPEG, and text in UTF-16: texts of this size together, as JSON, leave room for the rest.
_MAX_TEXTS_BYTES = 56_000
_PARAMETERS = frozenset(
    (*PipelineFields.model_fields, *CallFields.model_fields, *ChosenFields.model_fields, "adapters", "controls")
) - {
    *("prompt", "negative_prompt", "prompt_2", "seed"),  # not as they are
    *("task", "layers", "output_format"),
}
_UTF16 = "utf-16-be"  # the byte order is not specified; most readers use big endian
_PREVIEW_QUALITIES = (80, 60, 40, 20)


def encode(pixels: Pixels, job: Job, index: int) -> bytes:
    """Return image `index` of `job` as a file.

    `pixels` is [height, width, 3], or [height, width, 4] with transparency, which a JPEG shows on white. Metadata is
    written only when `job.embed_parameters` is set.
    """
    image = Image.fromarray(np.ascontiguousarray(pixels, dtype=np.uint8))
    parameters = parameters_json(job, index) if job.embed_parameters else None
    file = BytesIO()
    if image.mode == "RGBA" and job.output_format is OutputFormat.JPEG:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    match job.output_format:
        case OutputFormat.PNG:
            image.save(file, "PNG", pnginfo=_png_text(parameters), **_PNG)
        case OutputFormat.JPEG:
            image.save(file, "JPEG", quality=job.output_quality, exif=_exif(parameters))
        case OutputFormat.WEBP:
            image.save(file, "WEBP", quality=job.output_quality, method=_WEBP_METHOD, exif=_exif(parameters))
    return file.getvalue()


def encode_latents(latents: Latents, job: Job, index: int) -> bytes:
    """Return the latents of image `index` of `job` as a file, with metadata like those of images."""
    notes = {"software": SOFTWARE, "parameters": parameters_json(job, index)} if job.embed_parameters else None
    return file_of(latents.dtype, latents.shape, latents.values, notes)


def parameters_json(job: Job, index: int) -> str:
    """Return the parameters that reproduce output `index`, as JSON; its texts are cut if they are very long."""
    unused = {*(() if job.task.makes_video else ("frames", "fps")), *(() if job.controls else ("controls",))}
    if job.task.makes_audio:
        unused |= {"width", "height"}
    given = {"prompt": job.prompt, "negative_prompt": job.negative_prompt, "prompt_2": job.prompt_2}
    texts = {name: text for name, text in given.items() if text is not None}
    others = len(json.dumps(job.extra, ensure_ascii=False).encode(_UTF16, "replace")) if job.extra else 0
    parameters = {
        **{name: _cut(text, (_MAX_TEXTS_BYTES - others) // len(texts)) for name, text in texts.items()},
        "seed": job.seed_of(index),
        **job.model_dump(mode="json", include={*_PARAMETERS} - unused, exclude_none=True),
    }
    return json.dumps(parameters, ensure_ascii=False)


def _cut(text: str, room: int) -> str:
    """Return as much of a text as fits into `room` bytes. JSON writes a control character as up to six characters."""

    def size(length: int) -> int:
        return len(json.dumps(text[:length], ensure_ascii=False).encode(_UTF16, "replace")) - len('""'.encode(_UTF16))

    return text[: bisect_right(range(1, min(len(text), room) + 1), room, key=size)]


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
    # EXIF 2.3: eight bytes name the character code.
    exif.get_ifd(_EXIF_FOLDER)[_EXIF_USER_COMMENT] = b"UNICODE\0" + parameters.encode(_UTF16, "replace")
    return exif.tobytes()


class PreviewPublisher:
    """Stores previews in Redis; drops them during an outage, since the image follows."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue

    async def publish(self, claim: Claim, index: int, number: int, pixels: Pixels) -> None:
        """Store preview `number` of image `index`, if the claim is current."""
        job = claim.job
        data = await asyncio.to_thread(encode_preview, pixels, job.output_format.preview_format)
        try:
            await self._queue.previews.put(job.id, claim.epoch, index, number, data)
        except RedisUnavailable as error:
            log.debug("preview_dropped", job_id=job.id, error=error.message)


def encode_preview(pixels: Pixels, output_format: OutputFormat) -> bytes:
    """Return a file of at most `MAX_PREVIEW_BYTES`: at the best quality that fits, or smaller where none does."""
    image = Image.fromarray(pixels).convert("RGB")
    qualities = _PREVIEW_QUALITIES[:1] if output_format is OutputFormat.PNG else _PREVIEW_QUALITIES  # PNG has none
    while True:
        for quality in qualities:
            file = BytesIO()
            image.save(file, output_format.name, quality=quality)
            if len(data := file.getvalue()) <= MAX_PREVIEW_BYTES:
                return data
        image = image.resize((max(1, image.width // 2), max(1, image.height // 2)))
