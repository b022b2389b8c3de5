"""The unmodified `fal_client` against a real API; the tests act as the worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.api_thread import ApiThread
from harness.http_server import WORKER, deliver, next_claim, png

from shared.auth import Scope
from shared.job import Phase, State
from shared.job_record import Failure, Outcome, Progress
from shared.queue import Claim, ProgressReport, Queue
from shared.tasks import Task

fal_client = pytest.importorskip("fal_client", reason="fal-client is not installed; it is in the extra `dev`")

APP = "fusequeue/demo"
INPUT = {"prompt": "a red circle on a blue ground, left", "seed": 7}


class FalHarness:
    """An API process, its queue and a client of it."""

    def __init__(self, server: ApiThread, folder: Path, key: str) -> None:
        self.server, self.folder = server, folder
        self.queue = Queue.connect(server.settings)
        self.client = fal_client.AsyncClient(key=key)

    async def claim(self) -> Claim:
        """Claim the next job."""
        return await next_claim(self.queue)

    async def use_key(self) -> dict[str, str]:
        token, _ = await self.queue.api_keys.create("acme", frozenset((Scope.JOBS_READ, Scope.JOBS_WRITE)))
        self.client = fal_client.AsyncClient(key=token)
        return {"Authorization": f"Key {token}"}


@pytest.fixture
async def harness(
    serve: Callable[..., ApiThread], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[FalHarness]:
    server = serve()
    base = f"{server.url}/compat/fal"
    monkeypatch.setattr(fal_client.client, "QUEUE_URL_FORMAT", f"{base}/")
    monkeypatch.setattr(fal_client.client, "REST_URL", base)
    harness = FalHarness(server, tmp_path, "unused")
    yield harness
    await harness.queue.close()
    await (await harness.client._client).aclose()


async def test_subscribe_reports_the_position_and_the_logs_and_returns_the_images(harness: FalHarness) -> None:
    updates: list[Any] = []
    subscribing = asyncio.create_task(
        harness.client.subscribe(
            APP, {**INPUT, "num_inference_steps": 5}, with_logs=True, on_queue_update=updates.append, interval=0.02
        )
    )
    async with asyncio.timeout(60):
        while not updates:
            await asyncio.sleep(0.01)
    assert updates[0] == fal_client.Queued(position=0)
    claim = await harness.claim()
    assert (claim.job.steps, claim.job.seed, claim.job.priority) == (5, 7, "standard")
    report = ProgressReport(claim.job.id, claim.epoch, Phase.DENOISING, Progress(step=3, total=5))
    assert await harness.queue.claims.report_progress(report)
    async with asyncio.timeout(60):
        while not (isinstance(updates[-1], fal_client.InProgress) and len(updates[-1].logs or ()) == 2):
            await asyncio.sleep(0.01)
    seed, progress = updates[-1].logs
    assert (seed["message"], seed["level"]) == ("Using seed: 7", "INFO")
    assert progress["message"].endswith(" 3/5")
    data = await deliver(harness.queue, harness.folder, claim)
    result = await subscribing
    assert isinstance(updates[-1], fal_client.Completed)
    (image,) = result["images"]
    assert (image["content_type"], image["width"], image["height"], image["file_size"]) == (
        "image/png",
        64,
        64,
        len(data),
    )
    assert (result["seed"], result["has_nsfw_concepts"], result["prompt"]) == (7, [False], INPUT["prompt"])
    async with httpx.AsyncClient(timeout=60) as http:
        assert (await http.get(image["url"])).content == data


async def test_a_request_is_read_and_canceled_by_its_id(harness: FalHarness) -> None:
    """Its client repeats 408, 409 and 429 ten times: no response here has one of these."""
    client = harness.client
    queued = await client.submit(f"{APP}", INPUT, priority="low")
    assert await client.status(APP, queued.request_id) == fal_client.Queued(position=0)
    async with httpx.AsyncClient(timeout=60) as http:
        early = await http.get(queued.response_url)
        assert (early.status_code, early.json()["detail"]) == (400, "the request is still in progress")
    await client.cancel(APP, queued.request_id)
    status = await client.status(APP, queued.request_id, with_logs=True)
    assert isinstance(status, fal_client.Completed)
    assert (status.error_type, status.error) == ("job_canceled", "the request was canceled")
    with pytest.raises(fal_client.FalClientHTTPError, match="the request was canceled") as gone:
        await client.result(APP, queued.request_id)
    assert gone.value.status_code == 500
    with pytest.raises(fal_client.FalClientHTTPError) as again:
        await client.cancel(APP, queued.request_id)
    assert (again.value.status_code, again.value.response.json()) == (400, {"status": "ALREADY_COMPLETED"})

    failing = await client.submit(APP, INPUT)
    claim = await harness.claim()
    failure = Failure(code="invalid_input_image", message="image: cannot be decoded", param="image")
    await harness.queue.claims.settle(WORKER, claim.job.id, claim.epoch, Outcome(state=State.FAILED, error=failure))
    with pytest.raises(fal_client.FalClientHTTPError, match="cannot be decoded") as failed:
        await failing.get(interval=0.02)
    assert (failed.value.status_code, failed.value.error_type) == (422, "invalid_input_image")


async def test_an_error_names_the_field_of_the_input(harness: FalHarness) -> None:
    bad: list[tuple[dict[str, Any], str, str]] = [
        ({"num_inference_steps": 1000}, "num_inference_steps", "num_inference_steps must be 1 to 100, not 1000"),
        ({"stepz": 3}, "stepz", "stepz: there is no such field"),
        ({"image_size": "square_hd"}, "image_size", "image_size must be 64 to 128, not 1024"),
        ({"image_size": "wide"}, "image_size", "image_size: wide: it must be one of square_hd"),
        ({"image_size": {"width": 64, "height": 63}}, "image_size", "image_size must be 64 to 128, not 63"),
        ({"num_images": 99}, "num_images", "num_images is at most 8"),
        ({"loras": [{"path": "ink"}]}, "loras", "loras"),
        ({"sync_mode": True}, "sync_mode", "sync_mode: "),
        ({"enable_safety_checker": False}, "enable_safety_checker", "only the operator"),
        ({"image_url": "in_" + 32 * "0"}, "image_url", "image_url: unknown or expired input"),
        ({"image_url": 7}, "image_url", "image_url: "),
        ({"steps": 3, "num_inference_steps": 3}, "num_inference_steps", "send either steps or num_inference_steps"),
        ({"webhook": "https://a.example"}, "webhook", "there is no such field"),
    ]
    for values, field, message in bad:
        with pytest.raises(fal_client.FalClientHTTPError) as error:
            await harness.client.submit(APP, {**INPUT, **values})
        detail = error.value.response.json()["detail"][0]
        assert (error.value.status_code, detail["loc"][:2]) == (422, ["body", field]), detail
        assert message in detail["msg"]
    with pytest.raises(fal_client.FalClientHTTPError, match="unknown model: 'fal-ai/sdxl'; available: fusequeue/demo"):
        await harness.client.submit("fal-ai/sdxl", INPUT)
    with pytest.raises(fal_client.FalClientHTTPError, match="fal_webhook: not supported"):
        await harness.client.submit(APP, INPUT, webhook_url="https://a.example")
    assert await harness.queue.jobs.page("default") == ([], None)


async def test_an_uploaded_image_is_an_input_of_its_tenant(harness: FalHarness) -> None:
    """The bytes are sent to a signed URL, without a key."""
    headers = await harness.use_key()
    url = await harness.client.upload(png(), "image/png", repository="fal")
    handle = await harness.client.submit(APP, {**INPUT, "image_url": url, "strength": 0.5})
    job = (await harness.claim()).job
    assert (job.id, job.task, job.tenant) == (handle.request_id, Task.IMAGE_TO_IMAGE, "acme")
    assert job.images[0].id == url.rpartition("/")[2]

    async with httpx.AsyncClient(base_url=f"{harness.server.url}/compat/fal", timeout=60) as http:
        begun = (await http.post("/storage/upload/initiate", json={}, headers=headers)).json()["upload_url"]
        for other in (begun.replace("acme", "other"), begun.replace("input_id=in_", "input_id=in_0")[:-1]):
            assert (await http.put(other, content=png())).status_code in (403, 422)
        assert (await http.put(begun.partition("&")[0], content=png())).status_code == 401
        broken = await http.put(begun, content=b"not an image")
        assert (broken.status_code, broken.json()["detail"][0]["loc"]) == (422, ["body", "file"])
        assert (await http.put(begun, content=b"")).status_code == 422
        assert (await http.put(begun, content=png())).status_code == 200
        assert (await http.put(begun, content=png(colour="blue"))).status_code == 200, "a repetition changes nothing"
        other_tenant, _ = await harness.queue.api_keys.create("other", frozenset(Scope))
        for path in ("", "/status", "/status/stream"):
            read = await http.get(f"/{APP}/requests/{job.id}{path}", headers={"Authorization": f"Key {other_tenant}"})
            assert read.status_code == 404


async def test_the_stream_of_statuses_ends_with_the_completed_one(harness: FalHarness) -> None:
    handle = await harness.client.submit(APP, INPUT)
    claim = await harness.claim()
    lines: list[str] = []
    async with (
        httpx.AsyncClient(timeout=60) as http,
        http.stream("GET", f"{handle.status_url}/stream", params={"logs": "1"}) as stream,
    ):
        delivered = False
        async for line in stream.aiter_lines():
            lines.append(line)
            if "IN_PROGRESS" in line and not delivered:
                delivered = bool(await deliver(harness.queue, harness.folder, claim))
    assert stream.headers["content-type"].startswith("text/event-stream")
    statuses = [line for line in lines if line.startswith("data: ")]
    assert '"status":"COMPLETED"' in statuses[-1]
    assert sum("Using seed: 7" in status for status in statuses) == 1, "the client collects the lines"
