"""Encoding and uploading of outputs, also during a storage outage."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shared.config.destinations import Destination
from shared.errors import StorageRefused, StorageUnavailable, UploadFailed
from shared.job import Job
from shared.queue import Claim
from shared.tasks import OutputFormat, Task
from worker.engine.outputs import Audio, Output
from worker.output import upload
from worker.output.upload import Files, Uploader, object_key

PIXELS = np.zeros((64, 64, 3), np.uint8)


class StorageWithOutage:
    """Storage that is unavailable for the first `failures` writes."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.put_called = asyncio.Event()
        self.objects: dict[str, bytes] = {}

    async def put(self, key: str, data: bytes, content_type: str) -> None:
        self.put_called.set()
        if self.failures > 0:
            self.failures -= 1
            raise StorageUnavailable("outage")
        self.objects[key] = data


class RecordingSender:
    """Keeps the names of the files that it gets."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    async def send(self, claim: Claim, index: int, files: Files, held_bytes: int) -> None:
        self.sent += files


def claim() -> Claim:
    job = Job(
        id="job_1", tenant="default", created_at_ms=0, model="demo", width=64, height=64, prompt="x", seed=7, steps=2,
        guidance_scale=1.0, n=2,
    )  # fmt: skip
    return Claim(job, "demo:64x64x1:0", epoch=3, must_run_solo=False, queued_ms=5)


@pytest.fixture
async def make_uploader() -> AsyncIterator[Any]:
    uploaders: list[Uploader] = []

    def make(storage: StorageWithOutage, spool_bytes: int = 10**6, sender: RecordingSender | None = None) -> Uploader:
        uploaders.append(Uploader(storage, spool_bytes, sender or RecordingSender()))  # type: ignore[arg-type]
        return uploaders[-1]

    yield make
    for uploader in uploaders:
        uploader.close()


async def test_image_is_stored_below_its_job_and_attempt(make_uploader: Any) -> None:
    """The artifact has the seed of its own image."""
    storage = StorageWithOutage()
    artifact = await make_uploader(storage).upload(claim(), 1, Output(PIXELS))
    assert artifact.key == object_key(claim().job, 3, 1) == "jobs/job_1/3/1.png"
    assert artifact.seed == 8
    assert len(storage.objects[artifact.key]) == artifact.bytes


async def test_upload_is_retried_until_storage_is_available(
    make_uploader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No bytes are held afterwards."""
    monkeypatch.setattr(upload, "FIRST_RETRY_S", 0.001)
    storage = StorageWithOutage(5)
    uploader = make_uploader(storage)
    await uploader.upload(claim(), 0, Output(PIXELS))
    assert len(storage.objects) == 1
    assert uploader.held_bytes == 0


async def test_an_upload_that_storage_refuses_for_good_fails_its_job(
    make_uploader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job's error does not name the bucket."""
    monkeypatch.setattr(upload, "FIRST_RETRY_S", 0.001)
    monkeypatch.setattr(upload, "MAX_RETRY_S", 0.001)
    storage = StorageWithOutage()

    async def refuse(key: str, data: bytes, content_type: str) -> None:
        raise StorageRefused("bucket 'private' refused it", public="storage: refuses the request with 413")

    monkeypatch.setattr(storage, "put", refuse)
    uploader = make_uploader(storage)
    with pytest.raises(UploadFailed, match=r"0\.png cannot be stored: storage: refuses the request with 413"):
        await uploader.upload(claim(), 0, Output(PIXELS))
    assert uploader.held_bytes == 0


async def test_uploads_waiting_for_storage_fill_the_spool(make_uploader: Any) -> None:
    """Canceling an upload empties it."""
    storage = StorageWithOutage(10**6)
    uploader = make_uploader(storage, spool_bytes=10)
    uploading = asyncio.create_task(uploader.upload(claim(), 0, Output(PIXELS)))
    await storage.put_called.wait()
    assert uploader.full
    uploading.cancel()
    await asyncio.gather(uploading, return_exceptions=True)
    assert not uploader.full


async def test_many_small_images_fill_the_spool(make_uploader: Any) -> None:
    """Their jobs take more memory than the images; without a limit, a worker with slow storage holds any number."""
    storage = StorageWithOutage(10**6)
    uploader = make_uploader(storage, spool_bytes=512 * 1024 * 1024)
    uploading = [asyncio.create_task(uploader.upload(claim(), 0, Output(PIXELS))) for _ in range(300)]
    await storage.put_called.wait()
    assert uploader.full
    for task in uploading:
        task.cancel()
    await asyncio.gather(*uploading, return_exceptions=True)
    assert uploader.held_bytes == 0


async def test_video_is_stored_with_its_thumbnail(make_uploader: Any) -> None:
    """Both objects are below the job, where retention finds them."""
    storage = StorageWithOutage()
    frames = np.full((9, 32, 48, 3), 90, np.uint8)
    output = Output(frames, audio=Audio(np.zeros((2, 24000), np.float32), 24000))
    update = {"task": Task.TEXT_TO_VIDEO, "frames": 9, "fps": 8, "output_format": OutputFormat.MP4}
    uploader = make_uploader(storage)
    artifact = await uploader.upload(replace(claim(), job=claim().job.model_copy(update=update)), 0, output)
    assert (artifact.kind, artifact.key, artifact.content_type) == ("video", "jobs/job_1/3/0.mp4", "video/mp4")
    assert (artifact.width, artifact.height, artifact.frames, artifact.fps) == (48, 32, 9, 8)
    assert (artifact.duration_s, artifact.has_audio) == (1.125, True)
    assert artifact.thumbnail is not None
    assert artifact.thumbnail.key == "jobs/job_1/3/0-thumbnail.jpg"
    assert {key: len(data) for key, data in storage.objects.items()} == {
        artifact.key: artifact.bytes,
        artifact.thumbnail.key: artifact.thumbnail.bytes,
    }
    assert uploader.held_bytes == 0


def video_claim(output: Destination) -> Claim:
    update = {"task": Task.TEXT_TO_VIDEO, "frames": 9, "fps": 8, "output_format": OutputFormat.MP4, "output": output}
    return replace(claim(), job=claim().job.model_copy(update=update))


async def test_a_bucket_of_the_job_gets_the_video_and_its_thumbnail(make_uploader: Any) -> None:
    """The keys name no epoch, so that a second claim replaces the files of the first one. Nothing is stored here."""
    storage, sender = StorageWithOutage(), RecordingSender()
    uploader = make_uploader(storage, sender=sender)
    video = Output(np.full((9, 32, 48, 3), 90, np.uint8))
    artifact = await uploader.upload(video_claim(Destination(bucket="renders", prefix="a")), 0, video)
    assert artifact.location == "s3://renders/a/job_1-0.mp4"
    assert sender.sent == ["a/job_1-0.mp4", "a/job_1-0-thumbnail.jpg"] == [artifact.key, artifact.thumbnail.key]
    assert storage.objects == {}


async def test_a_put_url_gets_the_video_only(make_uploader: Any) -> None:
    sender = RecordingSender()
    uploader = make_uploader(StorageWithOutage(), sender=sender)
    url = "https://bucket.example/clip.mp4?X-Amz-Signature=secret"
    artifact = await uploader.upload(
        video_claim(Destination(put_urls=(url,))), 0, Output(np.full((9, 32, 48, 3), 90, np.uint8))
    )
    assert (artifact.location, artifact.thumbnail) == ("https://bucket.example/clip.mp4", None)
    assert len(sender.sent) == 1


async def test_layers_of_an_image_share_its_seed(make_uploader: Any) -> None:
    """Outputs are numbered over all layers; the layers of one image have one seed."""
    layered = replace(claim(), job=claim().job.model_copy(update={"layers": 3}))
    uploader = make_uploader(StorageWithOutage())
    artifacts = [await uploader.upload(layered, index, Output(PIXELS)) for index in range(6)]
    assert [artifact.seed for artifact in artifacts] == [7, 7, 7, 8, 8, 8]
