"""Videos with the unmodified `openai` SDK and a real API; the tests act as the worker, with real MP4 files."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import av
import httpx
import numpy as np
import openai
import pytest
from harness.api_process import Server
from harness.api_thread import ApiThread
from harness.disconnecting_client import send_and_disconnect, write_is_blocked
from harness.http_server import WORKER, next_claim, png
from harness.waiting import wait_until
from redis import Redis

from api.protocols.openai.batches.batch_files import BatchContext
from api.protocols.openai.batches.batch_runner import BatchRunner
from shared.config import models_file
from shared.job import Job, State
from shared.job_record import Artifact, Failure, Outcome, Thumbnail
from shared.queue import Claim, Queue
from shared.runtime.clock import SyncedClock, now_ms
from shared.storage import Storage, connect
from shared.tasks import Task
from worker.engine.outputs import Output
from worker.output.video_encoding import encode_video

# The SDK warns about the end of OpenAI's service.
pytestmark = pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")

MODELS = """
[[model]]
id = "film"
source = "x"
tasks = ["text_to_video", "image_to_video"]
[model.defaults]
width = 96
height = 64
frames = 17
fps = 16
[model.limits]
max_frames = 81
frames_multiple = 4
[[model.adapter]]
id = "ink"
source = "someone/ink"
weight_name = "ink.safetensors"

[[model]]
id = "still"
source = "x"
"""


@dataclass
class VideoHarness:
    """A server, its client, and a worker."""

    server: ApiThread
    client: openai.AsyncOpenAI
    queue: Queue
    storage: Storage

    async def claim(self) -> Claim:
        return await next_claim(self.queue, "film")

    async def finish_next(self) -> Job:
        """Finish the next job with a video."""
        claim = await self.claim()
        job, key = claim.job, f"jobs/{claim.job.id}/{claim.epoch}/0"
        video = encode_video(Output(np.full((job.frames, job.height, job.width, 3), 90, np.uint8)), job, 0)
        await self.storage.put(f"{key}.mp4", video.data, "video/mp4")
        await self.storage.put(f"{key}-thumbnail.jpg", video.thumbnail, "image/jpeg")
        width, height = video.thumbnail_size
        thumbnail = Thumbnail(
            key=f"{key}-thumbnail.jpg",
            content_type="image/jpeg",
            bytes=len(video.thumbnail),
            width=width,
            height=height,
        )
        artifact = Artifact(
            index=0,
            kind="video",
            key=f"{key}.mp4",
            content_type="video/mp4",
            bytes=len(video.data),
            width=video.width,
            height=video.height,
            seed=job.seed,
            frames=video.frames,
            fps=video.fps,
            duration_s=video.duration_s,
            has_audio=False,
            thumbnail=thumbnail,
        )
        done = Outcome(state=State.SUCCEEDED, artifacts=(artifact,))
        assert await self.queue.claims.settle(WORKER, job.id, claim.epoch, done)
        return job

    async def fail(self) -> None:
        claim = await self.claim()
        failure = Failure(code="out_of_memory", message="out of memory", retryable=True)
        assert await self.queue.claims.settle(
            WORKER, claim.job.id, claim.epoch, Outcome(state=State.FAILED, error=failure)
        )


@pytest.fixture
async def harness(serve: Callable[..., ApiThread], tmp_path: Path) -> AsyncIterator[VideoHarness]:
    (tmp_path / "models.toml").write_text(MODELS)
    server = serve(models=tmp_path / "models.toml")
    queue, storage = Queue.connect(server.settings), connect(server.settings)
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield VideoHarness(server, client, queue, storage)
    await queue.close()
    await storage.close()


async def test_a_video_is_created_polled_and_downloaded(harness: VideoHarness) -> None:
    """With the SDK's polling loop; the MP4 and its thumbnail can be decoded."""
    finishing = asyncio.create_task(harness.finish_next())
    video = await harness.client.videos.create_and_poll(
        model="film",
        prompt="a wave breaks",
        seconds="2",
        size="128x64",
        extra_body={"seed": 5},  # type: ignore[arg-type]
    )
    job = await finishing
    assert (video.status, video.progress, video.seconds, video.size) == ("completed", 100, "2.06", "128x64")
    assert (job.frames, job.fps, job.width, job.height, job.seed, job.task) == (33, 16, 128, 64, 5, Task.TEXT_TO_VIDEO)
    assert video.completed_at is not None
    data = (await harness.client.videos.download_content(video.id)).content
    with av.open(io.BytesIO(data)) as file:
        assert sum(1 for _ in file.decode(video=0)) == 33
    thumbnail = await harness.client.videos.download_content(video.id, variant="thumbnail")
    assert (thumbnail.content[:3], thumbnail.response.headers["content-type"]) == (b"\xff\xd8\xff", "image/jpeg")
    part = await harness.client.videos.download_content(video.id, extra_headers={"Range": "bytes=4-7"})
    assert part.content == b"ftyp"
    with pytest.raises(openai.NotFoundError):
        await harness.client.videos.download_content(video.id, variant="spritesheet")


async def test_json_and_multipart_requests_are_equivalent(harness: VideoHarness) -> None:
    """The SDK always sends multipart, other clients send JSON; an image is an id, a URL or a file."""
    body = {"model": "film", "prompt": "a wave", "num_frames": 21, "lora": ["ink"], "negative_prompt": "calm"}
    async with httpx.AsyncClient(base_url=harness.server.url, timeout=60) as http:
        ref = (await http.post("/v1/inputs", files={"file": png()})).json()["id"]
        as_json = (await http.post("/v1/videos", json={**body, "input_reference": {"file_id": ref}})).json()
    create = harness.client.videos.create
    more = {"num_frames": 21, "lora": ["ink"], "negative_prompt": "calm"}
    by_id = {**more, "input_reference": {"file_id": ref}}  # the SDK's parameter accepts no dict
    referenced = await create(model="film", prompt="a wave", extra_body=by_id)
    uploaded = await create(model="film", prompt="a wave", input_reference=("in.png", png()), extra_body=more)
    jobs = [await harness.finish_next() for _ in range(3)]
    assert {video.id for video in (referenced, uploaded)} | {as_json["id"]} == {
        job.id.replace("job", "video") for job in jobs
    }
    for job in jobs:
        assert (job.task, job.frames, job.negative_prompt) == (Task.IMAGE_TO_VIDEO, 21, "calm")
        assert ([ref.id for ref in job.images], [adapter.id for adapter in job.adapters]) == ([ref], ["ink"])


async def test_only_openai_statuses_are_returned(harness: VideoHarness) -> None:
    """Any other status would end the SDK's polling as completed; canceled and expired are failures."""
    client, queue = harness.client.videos, harness.queue
    video = await client.create(model="film", prompt="x")
    raw = await client.with_raw_response.retrieve(video.id)
    assert (video.status, int(raw.headers["openai-poll-after-ms"])) == ("queued", 1000)
    with pytest.raises(openai.NotFoundError, match="no content"):
        await client.download_content(video.id)
    await harness.fail()
    failed = await client.retrieve(video.id)
    assert failed.error is not None
    assert (failed.status, failed.error.code, failed.error.message) == ("failed", "out_of_memory", "out of memory")

    canceled = await client.create(model="film", prompt="x")
    await queue.jobs.cancel(canceled.id.replace("video", "job"))
    expired = await client.create(model="film", prompt="x", extra_body={"deadline_s": 0.001})
    async with asyncio.timeout(60):
        while not await queue.maintenance.expire():
            await asyncio.sleep(0.01)
    for video, code in ((canceled, "video_canceled"), (expired, "video_expired")):
        ended = await client.retrieve(video.id)
        assert ended.error is not None
        assert (ended.status, ended.error.code) == ("failed", code)

    running = await client.create(model="film", prompt="x")
    await harness.claim()
    assert (await client.retrieve(running.id)).status == "in_progress"


async def test_videos_are_paged_and_deleted(harness: VideoHarness) -> None:
    """Three pages in both orders, without image jobs; a deleted video has no files."""
    client = harness.client.videos
    ids = [(await client.create(model="film", prompt=f"number {number}")).id for number in range(5)]
    async with httpx.AsyncClient(base_url=harness.server.url, timeout=60) as http:
        await http.post("/v1/jobs", json={"model": "still", "prompt": "an image"})
        first = (await http.get("/v1/videos", params={"limit": 2})).json()
    assert (first["first_id"], first["last_id"], first["has_more"]) == (ids[4], ids[3], True)
    assert [video.id async for video in client.list(limit=2)] == ids[::-1]
    assert [video.id async for video in client.list(limit=2, order="asc")] == ids

    await harness.finish_next()
    assert (await client.delete(ids[0])).deleted  # completed
    assert (await client.delete(ids[4])).deleted  # queued
    assert await harness.storage.delete_prefix(f"jobs/{ids[0].replace('video', 'job')}") == 0
    assert [video.id async for video in client.list(limit=2)] == ids[3:0:-1]
    with pytest.raises(openai.NotFoundError):
        await client.retrieve(ids[0])

    claim = await harness.claim()
    deleting = asyncio.create_task(client.delete(ids[1]))
    async with asyncio.timeout(60):
        while not (await harness.queue.claims.renew(WORKER, {claim.job.id: claim.epoch})).cancel:
            await asyncio.sleep(0.01)
    await harness.queue.claims.settle(WORKER, claim.job.id, claim.epoch, Outcome(state=State.CANCELED))
    assert (await deleting).deleted


async def test_a_batch_of_videos(harness: VideoHarness) -> None:
    """Lines have the body of the endpoint, results are videos."""
    client, url = harness.client, "/v1/videos"
    bodies = [{"model": "film", "prompt": "a wave", "seconds": "1"}, {"model": "film", "prompt": "x", "seconds": "60"}]
    lines = [{"custom_id": f"{index}", "method": "POST", "url": url, "body": body} for index, body in enumerate(bodies)]
    file = await client.files.create(file=("in.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
    batch = await client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")
    settings = harness.server.settings
    context = BatchContext(
        settings, models_file.load(settings.models), harness.queue, harness.storage, SyncedClock(now_ms())
    )
    for finished in (False, True):
        while await BatchRunner(context, await harness.queue.batches.get("default", batch.id)).advance():
            pass
        if not finished:
            assert (await harness.finish_next()).frames == 17
    ended = await client.batches.retrieve(batch.id)
    (output,) = (await client.files.content(ended.output_file_id or "")).text.splitlines()
    (error,) = (await client.files.content(ended.error_file_id or "")).text.splitlines()
    video = json.loads(output)["response"]["body"]
    assert (video["object"], video["status"]) == ("video", "completed")
    assert (await client.videos.retrieve(video["id"])).prompt == "a wave"
    assert json.loads(error)["error"]["param"] == "seconds"


def create_without_response(request: httpx.Request, redis_url: str) -> bool:
    """Create a video and lose its response. Retries, because another blocked write can trigger the disconnect."""

    def count() -> int:
        return len(httpx.get(request.url, timeout=60).json()["data"])

    before = count()
    with Redis.from_url(redis_url) as redis:
        for _ in range(3):
            redis.client_pause(60_000, all=False)
            with pytest.raises(httpx.ReadTimeout):
                send_and_disconnect(request, lambda: write_is_blocked(redis))
            redis.client_unpause()
            with contextlib.suppress(AssertionError):
                wait_until(lambda: count() > before, "the video is created", 10)
                return True
    return False


async def test_a_retry_returns_the_video_of_its_first_attempt(start: Callable[..., Server], tmp_path: Path) -> None:
    """Without an Idempotency-Key: a retry is known by its header, if no response was delivered."""
    (tmp_path / "models.toml").write_text(MODELS)
    server = await asyncio.to_thread(start, models=str(tmp_path / "models.toml"))
    body = json.dumps({"model": "film", "prompt": "once"}).encode()
    headers = {"Content-Type": "application/json"}
    retry = {**headers, "x-stainless-retry-count": "1"}
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        first = (await http.post("/v1/videos", content=body, headers=headers)).json()
        repeated = (await http.post("/v1/videos", content=body, headers=retry)).json()
        assert repeated["id"] != first["id"]  # the first response was delivered

        request = httpx.Request("POST", f"{server.url}/v1/videos", content=body, headers=headers)
        assert await asyncio.to_thread(create_without_response, request, server.settings.redis_url)
        created = (await http.get("/v1/videos")).json()["data"][0]["id"]
        retried = await http.post("/v1/videos", content=body, headers=retry)
        assert retried.json()["id"] == created
