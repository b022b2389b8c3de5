"""The unmodified `replicate` SDK against a real API on real sockets; the tests act as the worker."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import httpx
import pytest
import replicate
from harness.api_thread import ApiThread
from harness.http_server import WORKER, deliver, next_claim, png
from harness.queue import put
from harness.tls import certificate
from harness.webhook_receiver import WebhookReceiver, receiving
from replicate.exceptions import ModelError, ReplicateError
from replicate.helpers import FileOutput
from replicate.prediction import Prediction
from replicate.webhook import InvalidSignatureError, Webhooks

from api.chores.webhooks import DeliveryPass
from api.protocols.replicate import prediction_routes as predictions
from shared.auth import Scope
from shared.inputs.fetch_guard import FetchGuard, FetchRules
from shared.job import JOB_FORM, Phase, State
from shared.job_record import Failure, Outcome, Progress
from shared.queue import Claim, ProgressReport, Queue
from shared.storage import connect
from shared.tasks import Task

LOOPBACK = (ip_network("127.0.0.0/8"),)
INPUT = {"prompt": "a red circle on a blue ground, left", "seed": 7}


@dataclass
class ReplicateHarness:
    """An API, its queue, and its clients."""

    url: str
    queue: Queue
    folder: Path
    transport: httpx.AsyncHTTPTransport

    def client(self, token: str = "unused", transport: Any = None) -> replicate.Client:
        """Return a client with a transport that can be closed; the SDK leaves its own open."""
        url = f"{self.url}/compat/replicate"
        client = replicate.Client(api_token=token, base_url=url, transport=transport or self.transport)
        client.poll_interval = 0.02
        return client

    async def claim(self) -> Claim:
        """Claim the next job."""
        return await next_claim(self.queue)

    async def finish_next(self) -> bytes:
        """Finish the next job, and return its image."""
        return await deliver(self.queue, self.folder, await self.claim())

    async def deliver_webhooks(self, receiver: WebhookReceiver) -> None:
        """Run one pass of the chore."""
        rules = FetchRules(30.0, 65_536, ports=(receiver.port,), allow_http=True, networks=LOOPBACK)
        assert await DeliveryPass(self.queue, FetchGuard(rules), "https://images.test").run() == 1


@pytest.fixture
async def harness(serve: Callable[..., ApiThread], tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """Start APIs: `harness(tls=True, auth="keys")`."""
    async with contextlib.AsyncExitStack() as stack:

        async def build(tls: bool = False, **settings: Any) -> ReplicateHarness:
            certificate_file, key_file, trusting = certificate(tmp_path)
            server = serve(tls=(certificate_file, key_file) if tls else None, **settings)
            queue = Queue.connect(server.settings)
            stack.push_async_callback(queue.close)
            transport = httpx.AsyncHTTPTransport(verify=trusting)
            stack.push_async_callback(transport.aclose)
            url = f"http{'s' if tls else ''}://localhost:{server.port}"
            return ReplicateHarness(url, queue, tmp_path, transport)

        yield build


async def test_a_prediction_is_created_polled_and_read(harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK reads its progress from the logs."""
    service = await harness()
    client = service.client()
    prediction = await client.predictions.async_create(version="fusequeue/demo", input={**INPUT, "num_outputs": 1})
    assert (prediction.status, prediction.model, prediction.progress) == ("starting", "fusequeue/demo", None)
    assert prediction.input is not None
    assert (prediction.input["seed"], prediction.input["num_inference_steps"]) == (7, 12)

    claim = await service.claim()
    assert await service.queue.claims.report_progress(
        ProgressReport(prediction.id, claim.epoch, Phase.DENOISING, Progress(step=3, total=12))
    )
    await prediction.async_reload()
    assert (prediction.status, prediction.output) == ("processing", None)
    assert prediction.progress == Prediction.Progress(percentage=0.25, current=3, total=12)

    waiting = asyncio.create_task(prediction.async_wait())
    data = await deliver(service.queue, service.folder, claim)
    await waiting
    assert (prediction.status, prediction.completed_at is not None) == ("succeeded", True)
    assert prediction.metrics is not None
    assert prediction.metrics["predict_time"] >= 0
    (output,) = prediction.output or ()
    assert await FileOutput(output, client).aread() == data
    by_url = (await client.predictions.async_list()).results[0].output
    assert by_url == [f"{service.url}/v1/jobs/{prediction.id}/artifacts/0"]
    assert await FileOutput(by_url[0], client).aread() == data

    with monkeypatch.context() as changed:
        changed.setattr(predictions, "MAX_INLINE_BYTES", len(data) - 1)
        await prediction.async_reload()
        assert prediction.output == by_url, "a large image is a URL"
    storage = connect(service.queue.client.settings.model_copy(update={"storage_dir": service.folder / "storage"}))
    await storage.delete_prefix(f"jobs/{prediction.id}/")
    await storage.close()
    await prediction.async_reload()
    assert prediction.output == by_url, "a deleted image is a URL"


async def test_run_waits_and_returns_files(harness: Any) -> None:
    """By model and by version, with both clients. After the wait the status is `starting`, even for a running job: the
    SDK takes any other status for the end."""
    service = await harness(max_wait_s=1)
    client = service.client()

    with httpx.HTTPTransport() as transport:
        run = service.client(transport=transport).run
        running = asyncio.create_task(asyncio.to_thread(run, "anyone/demo", input=INPUT))
        data = await service.finish_next()
        (output,) = await running
        assert isinstance(output, FileOutput)
        assert output.read() == b"".join(output) == data
    (record, *_), _ = await service.queue.jobs.page("default")
    assert record.job.priority == "interactive"

    model = await client.models.async_get("fusequeue/demo")
    assert model.latest_version is not None
    assert [listed.id for listed in await client.models.async_list()] == ["fusequeue/demo"]
    running = asyncio.create_task(client.async_run(f"fusequeue/demo:{model.latest_version.id}", input=INPUT))
    data = await service.finish_next()
    (output,) = await running
    assert await output.aread() == data

    creating = asyncio.create_task(client.models.predictions.async_create("fusequeue/demo", INPUT, wait=True))
    claim = await service.claim()
    prediction = await creating
    assert (prediction.id, prediction.status) == (claim.job.id, "starting")
    await prediction.async_reload()
    assert prediction.status == "processing"


async def test_failed_and_canceled_predictions(harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure raises its message. A queued job is canceled at once, a running one at its next step."""
    monkeypatch.setattr(predictions, "CANCEL_WAIT_S", 60.0)
    service = await harness()
    client = service.client()
    waiting = await client.predictions.async_create(version="demo", input=INPUT)
    await waiting.async_cancel()
    assert (waiting.status, waiting.output, waiting.error) == ("canceled", None, None)
    streamed = [(event.event.value, event.data) async for event in waiting.async_stream()]
    assert streamed == [("logs", "Using seed: 7\n"), ("done", '{"reason": "canceled"}')]

    running = await client.predictions.async_create(version="demo", input=INPUT)
    claim = await service.claim()
    canceling = asyncio.create_task(running.async_cancel())
    async with asyncio.timeout(60):
        while not (await service.queue.claims.renew(WORKER, {running.id: claim.epoch})).cancel:
            await asyncio.sleep(0.01)
    await service.queue.claims.settle(WORKER, running.id, claim.epoch, Outcome(state=State.CANCELED))
    await canceling
    assert running.status == "canceled"

    failing = asyncio.create_task(client.async_run("a/demo", input=INPUT))
    claim = await service.claim()
    failure = Failure(code="out_of_memory", message="out of memory")
    await service.queue.claims.settle(WORKER, claim.job.id, claim.epoch, Outcome(state=State.FAILED, error=failure))
    with pytest.raises(ModelError, match="out of memory") as failed:
        await failing
    with pytest.raises(RuntimeError, match="out of memory"):
        [event async for event in failed.value.prediction.async_stream()]

    async with httpx.AsyncClient(base_url=f"{service.url}/compat/replicate/v1", timeout=60) as http:
        body = {"version": "demo", "input": INPUT}
        response = await http.post("/predictions", json=body, headers={"Cancel-After": "5m"})
    job = (await service.claim()).job
    assert (response.status_code, response.json()["id"]) == (201, job.id)
    assert job.time_limit_ms == 300_000


async def test_predictions_are_paged(harness: Any, make_submission: Any) -> None:
    """Three pages forward with the SDK's loop, and two back."""
    service = await harness()
    client = service.client()
    ids = await put(service.queue, *(make_submission() for _ in range(230)))
    ids.sort(reverse=True)  # newest first
    pages = [page async for page in replicate.async_paginate(client.predictions.async_list)]
    assert [len(page) for page in pages] == [100, 100, 30]
    assert [item.id for page in pages for item in page] == ids
    assert (pages[0].previous, pages[2].next) == (None, None)
    back = await client.predictions.async_list(pages[2].previous or "")
    assert [item.id for item in back] == ids[100:200]
    first = await client.predictions.async_list(back.previous or "")
    assert ([item.id for item in first], first.previous) == (ids[:100], None)
    with pytest.raises(ReplicateError, match="cursor: it must be from"):
        await client.predictions.async_list("/v1/predictions?cursor=job_1")


async def test_an_open_file_is_uploaded_as_an_input_image(harness: Any) -> None:
    """Uploaded before the prediction or inlined, with any content type."""
    service = await harness()
    create = service.client().predictions.async_create
    files = {"image": io.BytesIO(png()), "mask": io.BytesIO(png(colour="white"))}
    uploaded = await create(version="demo", input={**INPUT, **files, "prompt_strength": 0.5})
    inline = await create(version="demo", input={**INPUT, **files}, file_encoding_strategy="base64")
    for prediction, strength in ((uploaded, 0.5), (inline, 1.0)):
        job = (await service.claim()).job
        assert (job.id, job.task, job.strength) == (prediction.id, Task.INPAINT, strength)
        assert prediction.input is not None
        assert [prediction.input["image"], prediction.input["mask"]] == [ref.id for ref in job.inputs.values()]
    file = await service.client().files.async_create(io.BytesIO(png()), filename="red.png", metadata={"a": 1})
    assert (file.name, file.content_type, file.size, file.metadata) == ("red.png", "image/png", len(png()), {"a": 1})
    with pytest.raises(ReplicateError) as broken:
        await service.client().files.async_create(io.BytesIO(b"not an image"))
    assert broken.value.status == 422


async def test_javascript_sends_the_metadata_of_a_file_as_a_file(harness: Any) -> None:
    service = await harness()
    files = {
        "content": ("buffer_1", png(), "application/octet-stream"),
        "metadata": ("blob", b'{"a": 1}', "application/json"),
    }
    async with httpx.AsyncClient(base_url=service.url, timeout=60) as http:
        uploaded = await http.post("/compat/replicate/v1/files", files=files)
    assert (uploaded.status_code, uploaded.json().get("metadata")) == (201, {"a": 1})


async def test_over_https_outputs_are_urls_for_their_tenant(harness: Any) -> None:
    """With keys: the file is read with the client's key from the same host, or by its signed URL."""
    service = await harness(tls=True, auth="keys")
    token, _ = await service.queue.api_keys.create("acme", frozenset({Scope.JOBS_READ, Scope.JOBS_WRITE}))
    other, _ = await service.queue.api_keys.create("other", frozenset({Scope.JOBS_READ}))
    client = service.client(token)
    running = asyncio.create_task(client.async_run("fusequeue/demo", input=INPUT))
    data = await service.finish_next()
    (output,) = await running
    assert output.url.startswith(f"{service.url}/v1/jobs/")
    assert await output.aread() == data
    unsigned = output.url.partition("?")[0]
    assert await FileOutput(unsigned, client).aread() == data
    with pytest.raises(httpx.HTTPStatusError, match="404"):
        await FileOutput(unsigned, service.client(other)).aread()

    for key, status, title in (("r8_x", 401, "The API key is not valid"), (other, 403, "The API key lacks a scope")):
        with pytest.raises(ReplicateError) as refused:
            await service.client(key).predictions.async_create(version="demo", input=INPUT)
        assert (refused.value.status, refused.value.title) == (status, title)
    with pytest.raises(ReplicateError) as missing:
        await service.client(other).predictions.async_get(unsigned.split("/")[-3])
    assert missing.value.status == 404
    assert not (await service.client(other).predictions.async_list()).results


async def test_the_sdk_validates_webhooks_of_predictions(harness: Any) -> None:
    """At the start and at the end; after a rotation with the old and the new secret."""
    allowed = {"webhook_allow_networks": LOOPBACK, "webhook_allow_http": True}
    with receiving() as receiver:
        service = await harness(**allowed, webhook_ports=(receiver.port,))
        client = service.client()
        old = await client.webhooks.default.async_secret()
        created = await client.predictions.async_create(version="demo", input=INPUT, webhook=receiver.url)
        claim = await service.claim()
        assert claim.job.schema_version == JOB_FORM, "older workers release this job"
        await service.deliver_webhooks(receiver)
        await deliver(service.queue, service.folder, claim)
        async with httpx.AsyncClient(base_url=service.url, timeout=60) as http:
            await http.post("/v1/webhooks/secret/rotate")
        await service.deliver_webhooks(receiver)
        new = await client.webhooks.default.async_secret()
    assert new.key != old.key
    (started, ended) = receiver.received
    Webhooks.validate(headers=started[0], body=started[1], secret=old, tolerance=60)
    for secret in (old, new):
        Webhooks.validate(headers=ended[0], body=ended[1], secret=secret, tolerance=60)
    with pytest.raises(InvalidSignatureError):
        Webhooks.validate(headers=started[0], body=started[1], secret=new)
    with pytest.raises(InvalidSignatureError):
        Webhooks.validate(headers=ended[0], body=ended[1] + " ", secret=new)
    first, last = (Prediction(**json.loads(content)) for _, content in receiver.received)
    assert (first.id, first.status, first.output) == (created.id, "processing", None)
    assert (last.id, last.status, last.version) == (created.id, "succeeded", created.version)
    assert last.output == [f"https://images.test/v1/jobs/{created.id}/artifacts/0"]
