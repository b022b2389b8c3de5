"""From pixels to storage: what happens while storage is away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shared.errors import StorageUnavailable
from shared.job import Job, OutputFormat, Task
from shared.queue import Claim
from worker.engine import Audio, Output
from worker.output import upload
from worker.output.upload import Uploader, object_key

PIXELS = np.zeros((64, 64, 3), np.uint8)


class Shelf:
    """Storage that is away for the first `failures` requests."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.asked = asyncio.Event()
        self.kept: dict[str, bytes] = {}

    async def put(self, key: str, data: bytes, content_type: str) -> None:
        self.asked.set()
        if self.failures > 0:
            self.failures -= 1
            raise StorageUnavailable("away")
        self.kept[key] = data


def claim() -> Claim:
    job = Job(
        id="job_1", tenant="default", created_at_ms=0, model="demo", width=64, height=64, prompt="x", seed=7, steps=2,
        guidance_scale=1.0, n=2,
    )  # fmt: skip
    return Claim(job, "demo:64x64x1:0", epoch=3, attempt=3, solo=False, queued_ms=5)


@pytest.fixture
async def delivering() -> AsyncIterator[Any]:
    made: list[Uploader] = []

    def build(shelf: Shelf, spool_bytes: int = 10**6) -> Uploader:
        made.append(Uploader(shelf, spool_bytes))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for delivery in made:
        delivery.close()


async def test_a_picture_is_stored_below_its_job_and_attempt(delivering: Any) -> None:
    """The key names job and attempt, and the artifact tells the seed of its own picture."""
    shelf = Shelf(0)
    artifact = await delivering(shelf).upload(claim(), 1, Output(PIXELS))
    assert artifact.key == object_key(claim().job, 3, 1) == "jobs/job_1/3/1.png"
    assert artifact.seed == 8
    assert len(shelf.kept[artifact.key]) == artifact.bytes


async def test_an_upload_outlasts_storage_that_is_away(delivering: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried again until storage answers; nothing is held afterwards."""
    monkeypatch.setattr(upload, "FIRST_RETRY_S", 0.001)
    shelf = Shelf(5)
    delivery = delivering(shelf)
    await delivery.upload(claim(), 0, Output(PIXELS))
    assert len(shelf.kept) == 1
    assert delivery.held_bytes == 0


async def test_what_waits_for_storage_fills_the_spool(delivering: Any) -> None:
    """A full spool is told, and giving the job up empties it."""
    shelf = Shelf(10**6)
    delivery = delivering(shelf, spool_bytes=10)
    upload = asyncio.create_task(delivery.upload(claim(), 0, Output(PIXELS)))
    await shelf.asked.wait()
    assert delivery.full
    upload.cancel()
    await asyncio.gather(upload, return_exceptions=True)
    assert not delivery.full


async def test_a_video_is_stored_with_its_thumbnail(delivering: Any) -> None:
    """The artifact tells what players need, and both objects lie below the job, where retention finds them."""
    shelf = Shelf(0)
    frames = np.full((9, 32, 48, 3), 90, np.uint8)
    made = Output(frames, audio=Audio(np.zeros((2, 24000), np.float32), 24000))
    clip = claim()
    job = clip.job.model_copy(
        update={"task": Task.TEXT_TO_VIDEO, "frames": 9, "fps": 8, "output_format": OutputFormat.MP4}
    )
    delivery = delivering(shelf)
    artifact = await delivery.upload(replace(clip, job=job), 0, made)
    assert (artifact.kind, artifact.key, artifact.content_type) == ("video", "jobs/job_1/3/0.mp4", "video/mp4")
    assert (artifact.width, artifact.height, artifact.frames, artifact.fps) == (48, 32, 9, 8)
    assert (artifact.duration_s, artifact.has_audio) == (1.125, True)
    assert artifact.thumbnail is not None
    assert artifact.thumbnail.key == "jobs/job_1/3/0-thumbnail.jpg"
    assert {key: len(data) for key, data in shelf.kept.items()} == {
        artifact.key: artifact.bytes,
        artifact.thumbnail.key: artifact.thumbnail.bytes,
    }
    assert delivery.held_bytes == 0


async def test_the_layers_of_a_picture_have_one_seed(delivering: Any) -> None:
    """Results are counted over all layers; each set of them comes from one run."""
    one = claim()
    layered = replace(one, job=one.job.model_copy(update={"layers": 3}))
    artifacts = [await delivering(Shelf(0)).upload(layered, index, Output(PIXELS)) for index in range(6)]
    assert [artifact.seed for artifact in artifacts] == [7, 7, 7, 8, 8, 8]
