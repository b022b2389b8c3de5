"""The `replicate` SDK as it is, against a real API on real sockets; the worker is played by hand."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import httpx
import pytest
import replicate
import uvicorn
from harness.http_server import WORKER, application, deliver, png
from harness.queue import put
from harness.tls import certificate
from harness.webhook_receiver import WebhookReceiver, receiving
from replicate.exceptions import ModelError, ReplicateError
from replicate.helpers import FileOutput
from replicate.prediction import Prediction
from replicate.webhook import InvalidSignatureError, Webhooks

from api.compat.replicate import predictions
from shared.auth import Scope
from shared.inputs.fetch_guard import FetchGuard, FetchRules
from shared.job import NEWEST_JOB, Failure, Outcome, Phase, Progress, State, Task
from shared.queue import Claim, ProgressReport, Queue
from shared.storage import connect
from worker.chores.webhooks import DeliveryPass

LOOPBACK = (ip_network("127.0.0.0/8"),)
INPUT = {"prompt": "a red circle on a blue ground, left", "seed": 7}


@dataclass
class Place:
    """An API, its queue, and clients of it."""

    url: str
    queue: Queue
    folder: Path
    transport: httpx.AsyncHTTPTransport

    def client(self, token: str = "unused", transport: Any = None) -> replicate.Client:
        """Return a client, of a transport that can be closed: the SDK's own stays open."""
        url = f"{self.url}/compat/replicate"
        made = replicate.Client(api_token=token, base_url=url, transport=transport or self.transport)
        made.poll_interval = 0.02
        return made

    async def claim(self) -> Claim:
        """Claim the next job, as a worker does."""
        async with asyncio.timeout(60):
            while True:
                for claim in await self.queue.claims.claim(WORKER, ["demo"], 1):
                    return claim
                await asyncio.sleep(0.01)

    async def make(self) -> bytes:
        """Do the next job, and return its picture."""
        return await deliver(self.queue, self.folder, await self.claim())

    async def deliver_webhooks(self, receiver: WebhookReceiver) -> None:
        """Make one pass of the chore."""
        rules = FetchRules(30.0, 65_536, ports=(receiver.port,), allow_http=True, networks=LOOPBACK)
        assert await DeliveryPass(self.queue, FetchGuard(rules), "https://pictures.test").run() == 1


@pytest.fixture
async def place(
    durable_server: Any, settings_for: Callable[..., Any], tmp_path: Path
) -> AsyncIterator[Callable[..., Any]]:
    """Start APIs on ports of their own; `place(tls=True, auth="keys")`."""
    async with contextlib.AsyncExitStack() as stack:

        async def build(tls: bool = False, **settings: Any) -> Place:
            queue = Queue.connect(settings_for(durable_server.url))
            stack.push_async_callback(queue.close)
            opened = socket.socket()
            opened.bind(("127.0.0.1", 0))
            options: dict[str, Any] = {}
            transport = httpx.AsyncHTTPTransport()
            if tls:
                certificate_file, key_file, trusting = certificate(tmp_path)
                options = {"ssl_certfile": certificate_file, "ssl_keyfile": key_file}
                transport = httpx.AsyncHTTPTransport(verify=trusting)
            app = application(queue, tmp_path, **settings)
            server = uvicorn.Server(uvicorn.Config(app, log_config=None, **options))
            serving = asyncio.create_task(server.serve([opened]))

            async def stop() -> None:
                server.should_exit = True
                await serving

            stack.push_async_callback(stop)
            stack.push_async_callback(transport.aclose)
            async with asyncio.timeout(60):
                while not server.started:
                    await asyncio.sleep(0.01)
            scheme = "https" if tls else "http"
            return Place(f"{scheme}://localhost:{opened.getsockname()[1]}", queue, tmp_path, transport)

        yield build


async def test_a_prediction_is_followed_to_its_picture(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Created, read on its way with the progress that the SDK finds in the logs, waited for."""
    here = await place()
    client = here.client()
    prediction = await client.predictions.async_create(version="fusequeue/demo", input={**INPUT, "num_outputs": 1})
    assert (prediction.status, prediction.model, prediction.progress) == ("starting", "fusequeue/demo", None)
    assert prediction.input is not None
    assert (prediction.input["seed"], prediction.input["num_inference_steps"]) == (7, 12)

    claim = await here.claim()
    assert await here.queue.claims.report_progress(
        ProgressReport(prediction.id, claim.epoch, Phase.DENOISING, Progress(step=3, total=12))
    )
    await prediction.async_reload()
    assert (prediction.status, prediction.output) == ("processing", None)
    assert prediction.progress == Prediction.Progress(percentage=0.25, current=3, total=12)

    waiting = asyncio.create_task(prediction.async_wait())
    data = await deliver(here.queue, here.folder, claim)
    await waiting
    assert (prediction.status, prediction.completed_at is not None) == ("succeeded", True)
    assert prediction.metrics is not None
    assert prediction.metrics["predict_time"] >= 0
    (output,) = prediction.output or ()
    assert await FileOutput(output, client).aread() == data
    by_url = (await client.predictions.async_list()).results[0].output
    assert by_url == [f"{here.url}/v1/jobs/{prediction.id}/artifacts/0"]
    assert await FileOutput(by_url[0], client).aread() == data

    with monkeypatch.context() as changed:
        changed.setattr(predictions, "MAX_INLINE_BYTES", len(data) - 1)
        await prediction.async_reload()
        assert prediction.output == by_url, "what is too large for the answer is told by its URL"
    storage = connect(here.queue.client.settings.model_copy(update={"storage_dir": here.folder / "storage"}))
    await storage.delete_prefix(f"jobs/{prediction.id}/")
    await storage.close()
    await prediction.async_reload()
    assert prediction.output == by_url, "what is gone is not found there, and the rest still told"


async def test_run_waits_and_gives_files(place: Any) -> None:
    """By model and by version, with either client; a wait that is over is told as `starting`, whatever the job does:
    the SDK takes anything else for the end."""
    here = await place(max_wait_s=1)
    client = here.client()

    with httpx.HTTPTransport() as transport:
        run = here.client(transport=transport).run
        running = asyncio.create_task(asyncio.to_thread(run, "anybody/demo", input=INPUT))
        data = await here.make()
        (output,) = await running
        assert isinstance(output, FileOutput)
        assert output.read() == b"".join(output) == data
    (record, *_), _ = await here.queue.jobs.page("default")
    assert record.job.priority == "interactive"

    model = await client.models.async_get("fusequeue/demo")
    assert model.latest_version is not None
    assert [one.id for one in await client.models.async_list()] == ["fusequeue/demo"]
    running = asyncio.create_task(client.async_run(f"fusequeue/demo:{model.latest_version.id}", input=INPUT))
    data = await here.make()
    (output,) = await running
    assert await output.aread() == data

    asking = asyncio.create_task(client.models.predictions.async_create("fusequeue/demo", INPUT, wait=True))
    claim = await here.claim()
    prediction = await asking
    assert (prediction.id, prediction.status) == (claim.job.id, "starting")
    await prediction.async_reload()
    assert prediction.status == "processing"


async def test_what_fails_or_is_canceled(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure raises with its words. A cancellation is told at once of a job that waits, else once it has left."""
    monkeypatch.setattr(predictions, "CANCEL_WAIT_S", 60.0)
    here = await place()
    client = here.client()
    waiting = await client.predictions.async_create(version="demo", input=INPUT)
    await waiting.async_cancel()
    assert (waiting.status, waiting.output, waiting.error) == ("canceled", None, None)
    told = [(event.event.value, event.data) async for event in waiting.async_stream()]
    assert told == [("logs", "Using seed: 7\n"), ("done", '{"reason": "canceled"}')]

    running = await client.predictions.async_create(version="demo", input=INPUT)
    claim = await here.claim()
    canceling = asyncio.create_task(running.async_cancel())
    async with asyncio.timeout(60):
        while not (await here.queue.claims.renew(WORKER, {running.id: claim.epoch})).cancel:
            await asyncio.sleep(0.01)
    await here.queue.claims.settle(WORKER, running.id, claim.epoch, Outcome(state=State.CANCELED))
    await canceling
    assert running.status == "canceled"

    failing = asyncio.create_task(client.async_run("a/demo", input=INPUT))
    claim = await here.claim()
    why = Failure(code="out_of_memory", message="it does not fit")
    await here.queue.claims.settle(WORKER, claim.job.id, claim.epoch, Outcome(state=State.FAILED, error=why))
    with pytest.raises(ModelError, match="it does not fit") as failed:
        await failing
    with pytest.raises(RuntimeError, match="it does not fit"):
        [event async for event in failed.value.prediction.async_stream()]

    async with httpx.AsyncClient(base_url=f"{here.url}/compat/replicate/v1", timeout=60) as http:
        body = {"version": "demo", "input": INPUT}
        answer = await http.post("/predictions", json=body, headers={"Cancel-After": "5m"})
    job = (await here.claim()).job
    assert (answer.status_code, answer.json()["id"]) == (201, job.id)
    assert job.deadline_at_ms == job.created_at_ms + 300_000


async def test_predictions_are_paged_through(place: Any, make_submission: Any) -> None:
    """Three pages forward, by the SDK's own loop, and two back."""
    here = await place()
    client = here.client()
    made = await put(here.queue, *(make_submission() for _ in range(230)))
    made.sort(reverse=True)  # newest first; of one millisecond, by their ids
    pages = [page async for page in replicate.async_paginate(client.predictions.async_list)]
    assert [len(page) for page in pages] == [100, 100, 30]
    assert [one.id for page in pages for one in page] == made
    assert (pages[0].previous, pages[2].next) == (None, None)
    back = await client.predictions.async_list(pages[2].previous or "")
    assert [one.id for one in back] == made[100:200]
    first = await client.predictions.async_list(back.previous or "")
    assert ([one.id for one in first], first.previous) == (made[:100], None)
    with pytest.raises(ReplicateError, match="cursor: it must be that of"):
        await client.predictions.async_list("/v1/predictions?cursor=job_1")


async def test_a_file_is_uploaded_and_started_from(place: Any) -> None:
    """An open file in an input goes up first; inline it may be too, of whatever type the SDK takes it for."""
    here = await place()
    create = here.client().predictions.async_create
    files = {"image": io.BytesIO(png()), "mask": io.BytesIO(png(colour="white"))}
    uploaded = await create(version="demo", input={**INPUT, **files, "prompt_strength": 0.5})
    inline = await create(version="demo", input={**INPUT, **files}, file_encoding_strategy="base64")
    for prediction, strength in ((uploaded, 0.5), (inline, 1.0)):
        job = (await here.claim()).job
        assert (job.id, job.task, job.strength) == (prediction.id, Task.INPAINT, strength)
        assert prediction.input is not None
        assert [prediction.input["image"], prediction.input["mask"]] == [ref.id for ref in job.inputs.values()]
    file = await here.client().files.async_create(io.BytesIO(png()), filename="red.png", metadata={"a": 1})
    assert (file.name, file.content_type, file.size, file.metadata) == ("red.png", "image/png", len(png()), {"a": 1})
    with pytest.raises(ReplicateError) as broken:
        await here.client().files.async_create(io.BytesIO(b"no picture"))
    assert broken.value.status == 422


async def test_an_error_names_the_field_as_the_client_knows_it(place: Any) -> None:
    """In the SDK's own exception, with title and detail."""
    here = await place()
    bad: list[tuple[dict[str, Any], str]] = [
        ({"input": {**INPUT, "num_inference_steps": 1000}}, "input.num_inference_steps must be 1 to 100, not 1000"),
        ({"input": {**INPUT, "stepz": 3}}, "input.stepz: there is no such field"),
        ({"input": {}}, "input.prompt: Field required"),
        ({"input": {**INPUT, "init_image": "in_" + 32 * "0"}}, "input.init_image: unknown or expired input: in_000"),
        ({"input": INPUT, "version": 64 * "f"}, "version: 'fff"),
        ({"input": INPUT, "webhook": "http://10.0.0.1/"}, "webhook: "),
        ({"input": INPUT, "webhook": "https://a.example", "webhook_events_filter": ["logs"]}, "logs are not sent here"),
    ]
    for body, words in bad:
        with pytest.raises(ReplicateError) as told:
            await here.client().predictions.async_create(**{"version": "demo", **body})
        assert told.value.status == 422
        assert told.value.title
        assert words in (told.value.detail or "")
    for asking in (here.client().models.async_get("a/sdxl"), here.client().async_run("a/sdxl", input=INPUT)):
        with pytest.raises(ReplicateError, match="'a/sdxl' is not served here; there are: fusequeue/demo") as missing:
            await asking
        assert missing.value.status == 404
    assert await here.queue.jobs.page("default") == ([], None)


async def test_https_gives_urls_that_only_their_tenant_can_read(place: Any) -> None:
    """Over TLS, with keys: the file is fetched with the client's own, from the host that was asked; or by its URL."""
    here = await place(tls=True, auth="keys")
    token, _ = await here.queue.api_keys.create("acme", frozenset({Scope.JOBS_READ, Scope.JOBS_WRITE}))
    other, _ = await here.queue.api_keys.create("other", frozenset({Scope.JOBS_READ}))
    client = here.client(token)
    running = asyncio.create_task(client.async_run("fusequeue/demo", input=INPUT))
    data = await here.make()
    (output,) = await running
    assert output.url.startswith(f"{here.url}/v1/jobs/")
    assert await output.aread() == data
    unsigned = output.url.partition("?")[0]
    assert await FileOutput(unsigned, client).aread() == data
    with pytest.raises(httpx.HTTPStatusError, match="404"):
        await FileOutput(unsigned, here.client(other)).aread()

    for key, status, title in (("r8_x", 401, "The API key is not valid"), (other, 403, "The API key may not do this")):
        with pytest.raises(ReplicateError) as refused:
            await here.client(key).predictions.async_create(version="demo", input=INPUT)
        assert (refused.value.status, refused.value.title) == (status, title)
    with pytest.raises(ReplicateError) as missing:
        await here.client(other).predictions.async_get(unsigned.split("/")[-3])
    assert missing.value.status == 404
    assert not (await here.client(other).predictions.async_list()).results


async def test_a_webhook_tells_predictions_that_the_sdk_validates(place: Any) -> None:
    """Real deliveries: at the start and at the end, and after a rotation by the old secret and by the new."""
    open_to_us = {"webhook_allow_networks": LOOPBACK, "webhook_allow_http": True}
    with receiving() as receiver:
        here = await place(**open_to_us, webhook_ports=(receiver.port,))
        client = here.client()
        old = await client.webhooks.default.async_secret()
        created = await client.predictions.async_create(version="demo", input=INPUT, webhook=receiver.url)
        claim = await here.claim()
        assert claim.job.schema_version == NEWEST_JOB, "workers that do not know such a webhook give it back"
        await here.deliver_webhooks(receiver)
        await deliver(here.queue, here.folder, claim)
        async with httpx.AsyncClient(base_url=here.url, timeout=60) as http:
            await http.post("/v1/webhooks/secret/rotate")
        await here.deliver_webhooks(receiver)
        new = await client.webhooks.default.async_secret()
    assert new.key != old.key
    (began, ended) = receiver.received
    Webhooks.validate(headers=began[0], body=began[1], secret=old, tolerance=60)
    for secret in (old, new):
        Webhooks.validate(headers=ended[0], body=ended[1], secret=secret, tolerance=60)
    with pytest.raises(InvalidSignatureError):
        Webhooks.validate(headers=began[0], body=began[1], secret=new)
    with pytest.raises(InvalidSignatureError):
        Webhooks.validate(headers=ended[0], body=ended[1] + " ", secret=new)
    first, last = (Prediction(**json.loads(content)) for _, content in receiver.received)
    assert (first.id, first.status, first.output) == (created.id, "processing", None)
    assert (last.id, last.status, last.version) == (created.id, "succeeded", created.version)
    assert last.output == [f"https://pictures.test/v1/jobs/{created.id}/artifacts/0"]
