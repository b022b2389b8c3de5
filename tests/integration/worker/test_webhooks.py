"""Webhooks from a job's end to a receiver that verifies them, over real sockets and a real Redis."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from harness.http_server import BODY, ROOT, serving
from harness.queue import claim, end, put
from openai.types.webhooks import BatchFailedWebhookEvent
from standardwebhooks import Webhook
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shared.config import models_file
from shared.inputs.fetch_guard import FetchGuard, FetchRules
from shared.job import State, Task
from shared.job import Webhook as JobWebhook
from shared.queue import Queue
from shared.storage import connect
from shared.webhooks import DISABLED_AFTER_S, DeliveryState
from worker.chores import webhooks
from worker.chores.batch_files import BatchContext
from worker.chores.batches import BatchRunner
from worker.chores.webhooks import DeliveryPass

LOOPBACK = (ip_network("127.0.0.0/8"),)


@dataclass
class Receiver:
    """A server that takes down what it gets, and answers as it is told."""

    port: int = 0
    answers: list[int] = field(default_factory=list)
    received: list[tuple[dict[str, str], str]] = field(default_factory=list)
    hang: asyncio.Event | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    @property
    def types(self) -> list[str]:
        return [json.loads(content)["type"] for _, content in self.received]

    async def take(self, request: Request) -> Response:
        content = (await request.body()).decode()
        if self.hang is not None:
            await self.hang.wait()
        self.received.append((dict(request.headers), content))
        return Response(status_code=self.answers.pop(0) if self.answers else 204, headers={"location": "/other"})


@pytest.fixture
async def listen() -> AsyncIterator[Callable[[], Any]]:
    """Start receivers on ports of their own."""
    async with contextlib.AsyncExitStack() as stack:

        async def build() -> Receiver:
            receiver = Receiver()
            app = Starlette(routes=[Route("/hook", receiver.take, methods=["POST"])])
            opened = socket.socket()
            opened.bind(("127.0.0.1", 0))
            receiver.port = opened.getsockname()[1]
            server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
            serving_it = asyncio.create_task(server.serve([opened]))

            async def stop() -> None:
                if receiver.hang is not None:
                    receiver.hang.set()
                server.should_exit = True
                await serving_it

            stack.push_async_callback(stop)
            while not server.started:
                await asyncio.sleep(0.005)
            return receiver

        yield build


@pytest.fixture
async def api(queue: Queue, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    allowed = {"webhook_allow_networks": LOOPBACK, "webhook_allow_http": True, "webhook_ports": range(1, 65_536)}
    async with serving(queue, tmp_path, **allowed) as client:
        yield client


def one_pass(queue: Queue, timeout_s: float = 60.0) -> DeliveryPass:
    rules = FetchRules(timeout_s, 65_536, ports=tuple(range(1, 65_536)), allow_http=True, networks=LOOPBACK)
    return DeliveryPass(queue, FetchGuard(rules), "https://pictures.test")


async def endpoint(api: httpx.AsyncClient, receiver: Receiver, **more: Any) -> dict[str, Any]:
    answer = await api.post("/v1/webhooks", json={"url": receiver.url, **more})
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


async def due_now(queue: Queue) -> None:
    """Let all that is scheduled be due, as if its time had come."""
    for host in await queue.client.redis.zrange(queue.client.redis_keys.webhook_hosts, 0, -1):
        for delivery in await queue.client.redis.zrange(queue.client.redis_keys.webhook_due(host), 0, -1):
            await queue.client.redis.zadd(queue.client.redis_keys.webhook_due(host), {delivery: 1})
        await queue.client.redis.zadd(queue.client.redis_keys.webhook_hosts, {host: 1})


async def ended(queue: Queue, make_submission: Any, **changes: Any) -> str:
    (job_id,) = await put(queue, make_submission(**changes))
    assert await end(queue, (await claim(queue))[0])
    return job_id


async def test_an_endpoint_hears_of_the_end_signed(
    queue: Queue, api: httpx.AsyncClient, listen: Any, make_submission: Any
) -> None:
    """Once, with the message id of its event, verified by the library that receivers use."""
    receiver = await listen()
    made = await endpoint(api, receiver)
    job_id = await ended(queue, make_submission)
    assert await one_pass(queue).run() == 1
    assert await one_pass(queue).run() == 0
    ((head, content),) = receiver.received
    told = Webhook(made["secret"]).verify(content, head)
    assert (told["type"], told["data"]["id"]) == ("job.succeeded", job_id)
    (delivery,) = (await api.get("/v1/webhooks/deliveries")).json()["data"]
    assert (delivery["state"], delivery["webhook_id"]) == ("delivered", head["webhook-id"])
    assert "secret" not in json.dumps((await api.get(f"/v1/webhooks/{made['id']}")).json()["url"])
    assert (await api.get(f"/v1/webhooks/{made['id']}")).json()["secret"] is None


async def test_an_endpoint_hears_of_the_end_of_a_batch(
    queue: Queue, api: httpx.AsyncClient, listen: Any, tmp_path: Path
) -> None:
    """Once, as OpenAI names it, in a form that OpenAI's own library takes."""
    receiver = await listen()
    made = await endpoint(api, receiver, events=["batch.failed", "job.failed"])
    assert made["events"] == ["batch.failed", "job.failed"]
    sent = {"files": {"file": ("in.jsonl", b"no json")}, "data": {"purpose": "batch"}}
    file = (await api.post("/v1/files", **sent)).json()["id"]
    batch = (await api.post("/v1/batches", json={"input_file_id": file, "endpoint": "/v1/jobs"})).json()
    settings = queue.client.settings.model_copy(update={"models": ROOT / "models.toml"})
    storage = connect(settings.model_copy(update={"storage_dir": tmp_path / "storage"}))
    desk = BatchContext(settings, models_file.load(settings.models), queue, storage)
    await BatchRunner(desk, await queue.batches.get("default", batch["id"])).advance()
    await storage.close()
    assert await one_pass(queue).run() == 1
    assert await one_pass(queue).run() == 0
    ((head, content),) = receiver.received
    with openai.OpenAI(api_key="none", webhook_secret=made["secret"]) as client:
        event = client.webhooks.unwrap(content, head)
    assert isinstance(event, BatchFailedWebhookEvent)
    assert event.data.id == batch["id"]


@pytest.mark.parametrize(("state", "event"), [(State.SUCCEEDED, "video.completed"), (State.CANCELED, "video.failed")])
async def test_an_endpoint_hears_of_the_end_of_a_video(
    queue: Queue, api: httpx.AsyncClient, listen: Any, make_submission: Any, state: State, event: str
) -> None:
    """Beside what it is told of the job, under a message id of its own; other jobs are no videos."""
    receiver = await listen()
    await endpoint(api, receiver, events=["video.completed", "video.failed", "job.succeeded", "job.canceled"])
    video_id, _ = await put(queue, make_submission(task=Task.TEXT_TO_VIDEO), make_submission())
    for one in await claim(queue):
        assert await end(queue, one, state=state)
    assert await one_pass(queue).run() == 3
    told = {json.loads(content)["type"]: json.loads(content)["data"] for _, content in receiver.received}
    assert sorted(receiver.types) == sorted([event, *2 * [f"job.{state.value}"]])
    assert told[event]["id"] == video_id.replace("job_", "video_")
    assert len({head["webhook-id"] for head, _ in receiver.received}) == 3


async def test_a_job_names_a_url_of_its_own(queue: Queue, api: httpx.AsyncClient, listen: Any) -> None:
    """With the events it asked for, signed by the tenant's secret; replaced, both sign for a while."""
    receiver = await listen()
    secret = (await api.get("/v1/webhooks/secret")).json()["secret"]
    body = {**BODY, "webhook": receiver.url, "webhook_events": ["job.queued", "job.canceled"]}
    job = (await api.post("/v1/jobs", json=body)).json()
    await api.post("/v1/webhooks/secret/rotate")
    await api.post(f"/v1/jobs/{job['id']}/cancel")
    assert await one_pass(queue).run() == 2
    assert sorted(receiver.types) == ["job.canceled", "job.queued"]
    new = (await api.get("/v1/webhooks/secret")).json()["secret"]
    assert new != secret
    for head, content in receiver.received:
        for one in (secret, new):
            Webhook(one).verify(content, head)


async def test_a_failed_attempt_is_made_again_under_the_same_id(
    queue: Queue, api: httpx.AsyncClient, listen: Any, make_submission: Any
) -> None:
    """A redirect and an error are failures; each attempt is in the log; a person may ask for one more."""
    receiver = await listen()
    receiver.answers += [302, 500]
    await endpoint(api, receiver)
    await ended(queue, make_submission)
    for _ in range(3):
        assert await one_pass(queue).run() == 1
        await due_now(queue)
    assert len({head["webhook-id"] for head, _ in receiver.received}) == 1
    (delivery,) = (await api.get("/v1/webhooks/deliveries")).json()["data"]
    assert [one["status"] for one in delivery["log"]] == [302, 500, 204]
    assert (delivery["state"], delivery["attempts"]) == ("delivered", 3)
    assert (await api.post(f"/v1/webhooks/deliveries/{delivery['id']}/redeliver")).status_code == 202
    assert await one_pass(queue).run() == 1
    assert len({head["webhook-id"] for head, _ in receiver.received}) == 1
    assert (await api.post("/v1/webhooks/deliveries/none/redeliver")).status_code == 404


async def test_a_crash_between_the_event_and_its_delivery_loses_nothing(
    queue: Queue, api: httpx.AsyncClient, listen: Any, make_submission: Any
) -> None:
    """Killed after the outbox was read, or after a delivery was claimed: it is made all the same, under its id."""
    receiver = await listen()
    await endpoint(api, receiver)
    await ended(queue, make_submission)
    assert await queue.webhooks.expand_outbox() == 1
    assert len(await queue.webhooks.claim_deliveries(10, 4, {}, again_ms=60_000)) == 1
    assert await one_pass(queue).run() == 0  # it is somebody's, who may still be at it
    await due_now(queue)
    assert await one_pass(queue).run() == 1
    assert receiver.types == ["job.succeeded"]


async def test_the_chore_delivers_under_its_settings(
    queue: Queue, listen: Any, make_submission: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the chores worker runs it: from the environment alone."""
    receiver = await listen()
    settings = {"REDIS_URL": queue.client.settings.redis_url, "NAMESPACE": queue.client.settings.namespace}
    settings |= {"WEBHOOK_ALLOW_NETWORKS": "127.0.0.0/8", "WEBHOOK_ALLOW_HTTP": "1"}
    settings |= {"WEBHOOK_PORTS": str(receiver.port), "PUBLIC_URL": "https://pictures.test/"}
    for name, value in settings.items():
        monkeypatch.setenv(f"FUSEQUEUE_{name}", value)
    job_id = await ended(queue, make_submission, webhook=JobWebhook(url=receiver.url, states=(State.SUCCEEDED,)))
    assert await asyncio.to_thread(webhooks.deliver) == 1
    ((_, content),) = receiver.received
    assert json.loads(content)["data"]["url"] == f"https://pictures.test/v1/jobs/{job_id}"


async def test_a_dead_host_stalls_nobody(
    queue: Queue, api: httpx.AsyncClient, listen: Any, make_submission: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forty events to one that hangs, and those of another arrive while it is still waited for."""
    dead, alive = await listen(), await listen()
    dead.hang = asyncio.Event()
    await endpoint(api, dead)
    for _ in range(40):
        await ended(queue, make_submission)
    await endpoint(api, alive)
    await ended(queue, make_submission)
    monkeypatch.setattr(webhooks, "BUDGET_S", 100.0)
    running = asyncio.create_task(one_pass(queue, timeout_s=90.0).run())
    async with asyncio.timeout(60):
        while not alive.received:
            await asyncio.sleep(0.02)
        await ended(queue, make_submission)  # and of one that comes during the pass
        while len(alive.received) < 2:
            await asyncio.sleep(0.02)
    assert not dead.received
    dead.hang.set()
    await running


async def test_an_endpoint_that_is_gone_or_fails_for_days_is_disabled(
    queue: Queue, api: httpx.AsyncClient, listen: Any, make_submission: Any
) -> None:
    """It gets nothing more until a person enables it again."""
    receiver = await listen()
    made = await endpoint(api, receiver)
    receiver.answers += [410]
    await ended(queue, make_submission)
    await one_pass(queue).run()
    told = (await api.get(f"/v1/webhooks/{made['id']}")).json()
    assert (told["enabled"], told["disabled_reason"]) == (False, "the endpoint responded with 410 Gone")
    await ended(queue, make_submission)
    assert await one_pass(queue).run() == 0

    assert (await api.patch(f"/v1/webhooks/{made['id']}", json={"enabled": True})).json()["disabled_reason"] is None
    stored = await queue.webhooks.endpoint("default", made["id"])
    long_ago = stored.created_at_ms - DISABLED_AFTER_S * 1000 - 1
    await queue.webhooks.put_endpoint("default", stored.model_copy(update={"failing_since": long_ago}))
    receiver.answers += [500]
    await ended(queue, make_submission)
    await one_pass(queue).run()
    assert not (await queue.webhooks.endpoint("default", made["id"])).enabled


async def test_what_is_deleted_gets_nothing_more(
    queue: Queue, api: httpx.AsyncClient, listen: Any, make_submission: Any
) -> None:
    receiver = await listen()
    made = await endpoint(api, receiver)
    await ended(queue, make_submission)
    await queue.webhooks.expand_outbox()
    assert (await api.delete(f"/v1/webhooks/{made['id']}")).status_code == 204
    await one_pass(queue).run()
    assert receiver.received == []
    (delivery,) = await queue.webhooks.deliveries("default")
    assert (delivery.state, delivery.log[0].error) == (DeliveryState.FAILED, "the endpoint was deleted or disabled")


async def test_another_tenants_jobs_are_not_told(
    queue: Queue, api: httpx.AsyncClient, listen: Any, make_submission: Any
) -> None:
    receiver = await listen()
    made = await endpoint(api, receiver)
    await ended(queue, make_submission, tenant="other")
    assert await one_pass(queue).run() == 0
    with pytest.raises(Exception, match="no such webhook endpoint"):
        await queue.webhooks.endpoint("other", made["id"])


async def test_a_test_event_can_be_sent(queue: Queue, api: httpx.AsyncClient, listen: Any) -> None:
    receiver = await listen()
    made = await endpoint(api, receiver, events=["job.failed"])
    sent = await api.post(f"/v1/webhooks/{made['id']}/test")
    assert sent.status_code == 202
    await one_pass(queue).run()
    assert receiver.types == ["webhook.test"]
    (delivery,) = (await api.get(f"/v1/webhooks/deliveries?endpoint={made['id']}")).json()["data"]
    assert delivery["id"] == sent.json()["delivery"]


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("ftp://example.com/x", "must begin with https"),
        ("http://10.0.0.1/x", "a private address"),
        ("http://169.254.169.254/latest", "a link-local address"),
        ("http://[::ffff:10.0.0.1]/", "a private address"),
        ("http://2130706433/", "neither a name nor an address"),
        ("http://0x7f.1/", "neither a name nor an address"),
        ("https://user:pass@example.com/", "user or password"),
    ],
)
async def test_urls_into_private_networks_are_refused_at_once(api: httpx.AsyncClient, url: str, told: str) -> None:
    """When an endpoint is made, and when a job is submitted; a name that turns private later is refused at delivery."""
    answer = await api.post("/v1/webhooks", json={"url": url})
    assert (answer.status_code, answer.json()["error"]["param"]) == (422, "url")
    assert told in answer.json()["detail"]
    answer = await api.post("/v1/jobs", json={**BODY, "webhook": url})
    assert (answer.status_code, answer.json()["error"]["param"]) == (422, "webhook")


async def test_a_name_that_turns_private_gets_nothing(queue: Queue, listen: Any, make_submission: Any) -> None:
    """Rebinding: what the name resolves to at the delivery is what counts."""
    receiver = await listen()

    async def resolve(_host: str, _port: int) -> list[str]:
        return ["127.0.0.1"]

    hook = JobWebhook(url=f"http://rebinding.test:{receiver.port}/hook", states=(State.SUCCEEDED,))
    await ended(queue, make_submission, webhook=hook)
    rules = FetchRules(60.0, 65_536, ports=tuple(range(1, 65_536)), allow_http=True)
    await DeliveryPass(queue, FetchGuard(rules, resolve), "").run()
    assert receiver.received == []
    (delivery,) = await queue.webhooks.deliveries("default")
    assert "a loopback address" in (delivery.log[0].error or "")


async def test_the_number_of_endpoints_is_bounded(api: httpx.AsyncClient, listen: Any) -> None:
    receiver = await listen()
    for _ in range(16):
        await endpoint(api, receiver)
    answer = await api.post("/v1/webhooks", json={"url": receiver.url})
    assert (answer.status_code, "delete one" in answer.json()["detail"]) == (409, True)
