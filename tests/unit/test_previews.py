"""Previews: small enough, each found once, and gone after a minute."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from shared.job import OutputFormat
from shared.queue import Queue
from shared.queue.previews import MAX_PREVIEW_BYTES, PREVIEWS_KEPT_S
from worker.previews import encode_preview

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
        await fake_queue.put_preview("job_a", index, number, b"file")
    found = await fake_queue.previews("job_a")
    assert [(one.index, one.number) for one in found] == [(0, 0), (0, 1), (1, 1)]
    assert await fake_queue.previews("job_a", {one.name for one in found}) == []
    await fake_queue.put_preview("job_a", 1, 0, b"file")
    assert [(one.index, one.number) for one in await fake_queue.previews("job_a", {one.name for one in found})] == [
        (1, 0)
    ]
    assert 0 < await fake_queue.redis.ttl(fake_queue.keys.previews("job_a")) <= PREVIEWS_KEPT_S


async def test_what_is_too_large_is_not_kept(fake_queue: Queue) -> None:
    with pytest.raises(ValueError, match="more than 64000"):
        await fake_queue.put_preview("job_a", 0, 0, b"x" * 64_001)
    assert await fake_queue.previews("job_a") == []
