"""Previews: small files, published in order, kept for a minute."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from harness.engine import a_spec
from harness.queue import claim, put
from PIL import Image

from shared.queue import Queue, Submission
from shared.queue.workers.previews import MAX_PREVIEW_BYTES, PREVIEWS_KEPT_S
from shared.tasks import OutputFormat
from worker.claims.claimed_job import ClaimedJob
from worker.output.image_encoding import PreviewPublisher, encode_preview

Make = Callable[..., Submission]
NOISE = np.random.default_rng(0).integers(0, 256, (512, 512, 3), np.uint8)


@pytest.mark.parametrize("output_format", [OutputFormat.PNG, OutputFormat.WEBP, OutputFormat.JPEG])
def test_preview_of_noise_fits_into_64_kb(output_format: OutputFormat) -> None:
    """Noise compresses worst, and early latents look like it."""
    data = encode_preview(NOISE, output_format)
    assert len(data) <= MAX_PREVIEW_BYTES
    assert Image.open(io.BytesIO(data)).format == output_format.name


def test_preview_that_fits_keeps_its_size() -> None:
    flat = np.full((512, 384, 3), 128, np.uint8)
    assert Image.open(io.BytesIO(encode_preview(flat, OutputFormat.WEBP))).size == (384, 512)


@pytest.mark.parametrize("output_format", list(OutputFormat))
def test_previews_have_the_format_of_the_image(output_format: OutputFormat) -> None:
    """A preview of a video is an image."""
    others = (OutputFormat.MP4, OutputFormat.GLB, OutputFormat.LATENT)
    expected = OutputFormat.WEBP if output_format in others else output_format
    assert output_format.preview_format is expected


async def test_previews_are_read_in_order_and_once(fake_queue: Queue, make_submission: Make) -> None:
    previews = fake_queue.previews
    await put(fake_queue, make_submission(id="job_a"))
    (one,) = await claim(fake_queue)
    for index, number in ((1, 1), (0, 1), (0, 0)):
        await previews.put("job_a", one.epoch, index, number, b"file")
    first = await previews.get("job_a")
    assert [(preview.index, preview.number) for preview in first] == [(0, 0), (0, 1), (1, 1)]
    known = {preview.name for preview in first}
    assert await previews.get("job_a", known) == []
    await previews.put("job_a", one.epoch, 1, 0, b"file")
    assert [(preview.index, preview.number) for preview in await previews.get("job_a", known)] == [(1, 0)]
    client = fake_queue.client
    assert 0 < await client.redis.ttl(client.redis_keys.previews("job_a")) <= PREVIEWS_KEPT_S


async def test_previews_are_published_in_order(
    fake_queue: Queue, make_submission: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when an earlier preview takes longer to encode."""
    slow, encoded = threading.Event(), list[int]()

    def encode(pixels: np.ndarray, output_format: OutputFormat) -> bytes:
        if not pixels.any():
            slow.wait(60)
        encoded.append(int(pixels.max()))
        return encode_preview(pixels, output_format)

    monkeypatch.setattr("worker.output.image_encoding.encode_preview", encode)
    (job_id,) = await put(fake_queue, make_submission())
    (one,) = await claim(fake_queue)
    claimed = ClaimedJob(one, a_spec(Path("none")))
    for shade in (0, 1, 2):
        claimed.publish_preview(PreviewPublisher(fake_queue), 0, np.full((8, 8, 3), shade, np.uint8))
    await asyncio.sleep(0.05)  # a preview that does not wait for the first one is encoded by now
    slow.set()
    await claimed.wait_for_previews()
    assert encoded == [0, 1, 2]
    assert [preview.number for preview in await fake_queue.previews.get(job_id)] == [0, 1, 2]


async def test_too_large_preview_is_refused(fake_queue: Queue) -> None:
    with pytest.raises(ValueError, match="at most 64000"):
        await fake_queue.previews.put("job_a", 1, 0, 0, b"x" * 64_001)
    assert await fake_queue.previews.get("job_a") == []
