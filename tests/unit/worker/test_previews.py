"""Previews: small enough, each found once, and gone after a minute."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from harness.engine import a_spec
from PIL import Image

from shared.job import Job, OutputFormat
from shared.queue import Claim, Queue
from shared.queue.previews import MAX_PREVIEW_BYTES, PREVIEWS_KEPT_S
from worker.job_runner import ClaimedJob
from worker.output.images import PreviewPublisher, encode_preview

NOISE = np.random.default_rng(0).integers(0, 256, (512, 512, 3), np.uint8)


@pytest.mark.parametrize("kind", [OutputFormat.WEBP, OutputFormat.JPEG])
def test_a_preview_is_of_at_most_64_kb_whatever_it_shows(kind: OutputFormat) -> None:
    """Noise is what compresses worst, and what early latents look like."""
    data = encode_preview(NOISE, kind)
    assert len(data) <= MAX_PREVIEW_BYTES
    assert Image.open(io.BytesIO(data)).format == kind.name


def test_a_preview_that_fits_keeps_its_size() -> None:
    flat = np.full((512, 384, 3), 128, np.uint8)
    assert Image.open(io.BytesIO(encode_preview(flat, OutputFormat.WEBP))).size == (384, 512)


@pytest.mark.parametrize("wanted", list(OutputFormat))
def test_previews_have_a_format_that_is_small(wanted: OutputFormat) -> None:
    assert wanted.of_previews in (OutputFormat.WEBP, OutputFormat.JPEG)


async def test_previews_are_found_in_order_and_once(fake_queue: Queue) -> None:
    for index, number in ((1, 1), (0, 1), (0, 0)):
        await fake_queue.previews.put("job_a", index, number, b"file")
    found = await fake_queue.previews.get("job_a")
    assert [(one.index, one.number) for one in found] == [(0, 0), (0, 1), (1, 1)]
    assert await fake_queue.previews.get("job_a", {one.name for one in found}) == []
    await fake_queue.previews.put("job_a", 1, 0, b"file")
    assert [(one.index, one.number) for one in await fake_queue.previews.get("job_a", {one.name for one in found})] == [
        (1, 0)
    ]
    assert 0 < await fake_queue.client.redis.ttl(fake_queue.client.redis_keys.previews("job_a")) <= PREVIEWS_KEPT_S


async def test_previews_are_told_in_the_order_in_which_they_were_taken(
    fake_queue: Queue, make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the encoding of an earlier one takes: who follows a picture sees it come."""
    slow, told = threading.Event(), list[int]()

    def encode(pixels: np.ndarray, kind: OutputFormat) -> bytes:
        if not pixels.any():
            slow.wait(60)
        told.append(int(pixels.max()))
        return encode_preview(pixels, kind)

    monkeypatch.setattr("worker.output.images.encode_preview", encode)
    job = make_job()
    run = ClaimedJob(Claim(job, "s", epoch=1, attempt=1, solo=False, queued_ms=0), a_spec(Path("none")))
    for shade in (0, 1, 2):
        run.publish_preview(PreviewPublisher(fake_queue), 0, np.full((8, 8, 3), shade, np.uint8))
    await asyncio.sleep(0.05)  # what does not wait for the first would be told by now
    slow.set()
    await run.previews_published()
    assert told == [0, 1, 2]
    assert [one.number for one in await fake_queue.previews.get(job.id)] == [0, 1, 2]


async def test_what_is_too_large_is_not_kept(fake_queue: Queue) -> None:
    with pytest.raises(ValueError, match="more than 64000"):
        await fake_queue.previews.put("job_a", 0, 0, b"x" * 64_001)
    assert await fake_queue.previews.get("job_a") == []
