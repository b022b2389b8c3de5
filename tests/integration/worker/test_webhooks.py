"""Webhooks from the end of a job to a verifying receiver, over real sockets and a real Redis."""

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

from api.chores import webhooks
from api.chores.webhooks import DeliveryPass
from api.protocols.openai.batches.batch_files import BatchContext
from api.protocols.openai.batches.batch_runner import BatchRunner
from shared.config import models_file
from shared.inputs.fetch_guard import FetchGuard, FetchRules
from shared.job import State
from shared.job import Webhook as JobWebhook
from shared.queue import Queue
from shared.queue.tenants.webhooks import MAX_ENDPOINTS
from shared.runtime.clock import SyncedClock, now_ms
from shared.storage import connect
from shared.tasks import Task
from shared.webhooks import DISABLED_AFTER_S, DeliveryState, WebhookEndpoint

LOOPBACK = (ip_network("127.0.0.0/8"),)


@dataclass
class ScriptedReceiver:
    """Records webhooks; responds with the next of `statuses`, or 204."""

    port: int = 0
    statuses: list[int] = field(default_factory=list)
    received: list[tuple[dict[str, str], str]] = field(default_factory=list)
    hang: asyncio.Event | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    @property
    def types(self) -> list[str]:
        return [json.loads(content)["type"] for _, content in self.received]

    async def receive(self, request: Request) -> Response:
        content = (await request.body()).decode()
        if self.hang is not None:
            await self.hang.wait()
        self.received.append((dict(request.headers), content))
        return Response(status_code=self.statuses.pop(0) if self.statuses else 204, headers={"location": "/other"})


@pytest.fixture
async def listen() -> AsyncIterator[Callable[[], Any]]:
    """Start receivers on free ports."""
    async with contextlib.AsyncExitStack() as stack:

        async def build() -> ScriptedReceiver:
            receiver = ScriptedReceiver()
            app = Starlette(routes=[Route("/hook", receiver.receive, methods=["POST"])])
            listener = socket.socket()
            listener.bind(("127.0.0.1", 0))
            receiver.port = listener.getsockname()[1]
            server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
            serving_task = asyncio.create_task(server.serve([listener]))

            async def stop() -> None:
                if receiver.hang is not None:
                    receiver.hang.set()
                server.should_exit = True
                await serving_task

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


def delivery_pass(queue: Queue, timeout_s: float = 60.0) -> DeliveryPass:
    rules = FetchRules(timeout_s, 65_536, ports=tuple(range(1, 65_536)), allow_http=True, networks=LOOPBACK)
    return DeliveryPass(queue, FetchGuard(rules), "https://images.test")


async def endpoint(api: httpx.AsyncClient, receiver: ScriptedReceiver, **more: Any) -> dict[str, Any]:
    response = await api.post("/v1/webhooks", json={"url": receiver.url, **more})
    assert response.status_code == 201, response.text
    created: dict[str, Any] = response.json()
    return created


async def make_due(queue: Queue) -> None:
    """Make all scheduled deliveries due."""
    redis, keys = queue.client.redis, queue.client.redis_keys
    for tenant in await redis.zrange(keys.webhook_tenants, 0, -1):
        for host in await redis.zrange(keys.webhook_hosts(tenant), 0, -1):
            for delivery in await redis.zrange(keys.webhook_due(tenant, host), 0, -1):
                await redis.zadd(keys.webhook_due(tenant, host), {delivery: 1})
            await redis.zadd(keys.webhook_hosts(tenant), {host: 1})
        await redis.zadd(keys.webhook_tenants, {tenant: 1})


async def ended(queue: Queue, make_submission: Any, **changes: Any) -> str:
    (job_id,) = await put(queue, make_submission(**changes))
    assert await end(queue, (await claim(queue))[0])
    return job_id


async def test_the_end_of_a_job_is_delivered_and_signed(
    queue: Queue, api: httpx.AsyncClient, listen: Any, make_submission: Any
) -> None:
    """Once, with the message id of its event; the signature passes the reference library."""
    receiver = await listen()
    created = await endpoint(api, receiver)
    job_id = await ended(queue, make_submission)
    assert await delivery_pass(queue).run() == 1
    assert await delivery_pass(queue).run() == 0
    ((headers, content),) = receiver.received
    event = Webhook(created["secret"]).verify(content, headers)
    assert (event["type"], event["data"]["id"]) == ("job.succeeded", job_id)
    (delivery,) = (await api.get("/v1/webhooks/deliveries")).json()["data"]
    assert (delivery["state"], delivery["webhook_id"]) == ("delivered", headers["webhook-id"])
    assert "secret" not in json.dumps((await api.get(f"/v1/webhooks/{created['id']}")).json()["url"])
    assert (await api.get(f"/v1/webhooks/{created['id']}")).json()["secret"] is None


async def test_the_end_of_a_batch_is_delivered(
    queue: Queue, api: httpx.AsyncClient, listen: Any, tmp_path: Path
) -> None:
    """Once, as an OpenAI event that OpenAI's SDK unwraps."""
    receiver = await listen()
    created = await endpoint(api, receiver, events=["batch.failed", "job.failed"])
    assert created["events"] == ["batch.failed", "job.failed"]
    upload = {"files": {"file": ("in.jsonl", b"no json")}, "data": {"purpose": "batch"}}
    file = (await api.post("/v1/files", **upload)).json()["id"]
    batch = (await api.post("/v1/batches", json={"input_file_id": file, "endpoint": "/v1/jobs"})).json()
    settings = queue.client.settings.model_copy(update={"models": ROOT / "models.toml"})
    storage = connect(settings.model_copy(update={"storage_dir": tmp_path / "storage"}))
    context = BatchContext(settings, models_file.load(settings.models), queue, storage, SyncedClock(now_ms()))
    await BatchRunner(context, await queue.batches.get("default", batch["id"])).advance()
    await storage.close()
    assert await delivery_pass(queue).run() == 1
    assert await delivery_pass(queue).run() == 0
    ((headers, content),) = receiver.received
    with openai.OpenAI(api_key="none", webhook_secret=created["secret"]) as client:
        event = client.webhooks.unwrap(content, headers)
    assert isinstance(event, BatchFailedWebhookEvent)
    assert event.data.id == batch["id"]


@pytest.mark.parametrize(("state", "event"), [(State.SUCCEEDED, "video.completed"), (State.CANCELED, "video.failed")])
async def test_the_end_of_a_video_is_delivered(
    queue: Queue, api: httpx.AsyncClient, listen: Any, make_submission: Any, state: State, event: str
) -> None:
    """In addition to the job's event, with its own message id; other jobs are not videos."""
    receiver = await listen()
    await endpoint(api, receiver, events=["video.completed", "video.failed", "job.succeeded", "job.canceled"])
    video_id, _ = await put(queue, make_submission(task=Task.TEXT_TO_VIDEO), make_submission())
    for claimed in await claim(queue):
        assert await end(queue, claimed, state=state)
    assert await delivery_pass(queue).run() == 3
    events = {json.loads(content)["type"]: json.loads(content)["data"] for _, content in receiver.received}
    assert sorted(receiver.types) == sorted([event, *2 * [f"job.{state.value}"]])
    assert events[event]["id"] == video_id.replace("job_", "video_")
    assert len({headers["webhook-id"] for headers, _ in receiver.received}) == 3


async def test_a_job_can_have_its_own_webhook(queue: Queue, api: httpx.AsyncClient, listen: Any) -> None:
    """With its events, signed by the tenant's secret; during a rotation both secrets sign."""
    receiver = await listen()
    secret = (await api.get("/v1/webhooks/secret")).json()["secret"]
    body = {**BODY, "webhook": receiver.url, "webhook_events": ["job.queued", "job.canceled"]}
    job = (await api.post("/v1/jobs", json=body)).json()
    await api.post("/v1/webhooks/secret/rotate")
    await api.post(f"/v1/jobs/{job['id']}/cancel")
    assert await delivery_pass(queue).run() == 2
    assert sorted(receiver.types) == ["job.canceled", "job.queued"]
    new = (await api.get("/v1/webhooks/secret")).json()["secret"]
    assert new != secret
    for headers, content in receiver.received:
        for key in (secret, new):
            Webhook(key).verify(content, headers)


async def test_a_failed_attempt_is_retried_with_the_same_message_id(
    queue: Queue, api: httpx.AsyncClient, listen: Any, make_submission: Any
) -> None:
    """A redirect and an error are failures; the log has each attempt; a redelivery can be requested."""
    receiver = await listen()
    receiver.statuses += [302, 500]
    await endpoint(api, receiver)
    await ended(queue, make_submission)
    for _ in range(3):
        assert await delivery_pass(queue).run() == 1
        await make_due(queue)
    assert len({headers["webhook-id"] for headers, _ in receiver.received}) == 1
    (delivery,) = (await api.get("/v1/webhooks/deliveries")).json()["data"]
    assert [attempt["status"] for attempt in delivery["log"]] == [302, 500, 204]
    assert (delivery["state"], delivery["attempts"]) == ("delivered", 3)
    assert (await api.post(f"/v1/webhooks/deliveries/{delivery['id']}/redeliver")).status_code == 202
    assert await delivery_pass(queue).run() == 1
    assert len({headers["webhook-id"] for headers, _ in receiver.received}) == 1
    assert (await api.post("/v1/webhooks/deliveries/none/redeliver")).status_code == 404


async def test_no_delivery_is_lost_by_a_crash(
    queue: Queue, api: httpx.AsyncClient, listen: Any, make_submission: Any
) -> None:
    """After a kill between reading the outbox, claiming and delivering, it is delivered with the same id."""
    receiver = await listen()
    await endpoint(api, receiver)
    await ended(queue, make_submission)
    assert await queue.webhooks.expand_outbox() == 1
    assert len(await queue.webhooks.claim_deliveries(10, 4, {}, again_ms=60_000)) == 1
    assert await delivery_pass(queue).run() == 0  # claimed by a sender that can still be running
    await make_due(queue)
    assert await delivery_pass(queue).run() == 1
    assert receiver.types == ["job.succeeded"]


async def test_the_chore_reads_its_settings_from_the_environment(
    queue: Queue, listen: Any, make_submission: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = await listen()
    settings = {"REDIS_URL": queue.client.settings.redis_url, "NAMESPACE": queue.client.settings.namespace}
    settings |= {"WEBHOOK_ALLOW_NETWORKS": "127.0.0.0/8", "WEBHOOK_ALLOW_HTTP": "1"}
    settings |= {"WEBHOOK_PORTS": str(receiver.port), "PUBLIC_URL": "https://images.test/"}
    for name, value in settings.items():
        monkeypatch.setenv(f"FUSEQUEUE_{name}", value)
    job_id = await ended(queue, make_submission, webhook=JobWebhook(url=receiver.url, states=(State.SUCCEEDED,)))
    assert await asyncio.to_thread(webhooks.deliver) == 1
    await asyncio.to_thread(webhooks.BACKGROUND.close)
    ((_, content),) = receiver.received
    assert json.loads(content)["data"]["url"] == f"https://images.test/v1/jobs/{job_id}"


async def test_a_dead_host_does_not_stall_others(
    queue: Queue, api: httpx.AsyncClient, listen: Any, make_submission: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While 40 deliveries to one host hang, those to another host arrive."""
    dead, alive = await listen(), await listen()
    dead.hang = asyncio.Event()
    await endpoint(api, dead)
    for _ in range(40):
        await ended(queue, make_submission)
    await endpoint(api, alive)
    await ended(queue, make_submission)
    monkeypatch.setattr(webhooks, "BUDGET_S", 100.0)
    running = asyncio.create_task(delivery_pass(queue, timeout_s=90.0).run())
    async with asyncio.timeout(60):
        while not alive.received:
            await asyncio.sleep(0.02)
        await ended(queue, make_submission)  # also an event during the pass
        while len(alive.received) < 2:
            await asyncio.sleep(0.02)
    assert not dead.received
    dead.hang.set()
    await running


async def test_an_endpoint_that_is_gone_or_fails_for_days_is_disabled(
    queue: Queue, api: httpx.AsyncClient, listen: Any, make_submission: Any
) -> None:
    """It receives nothing until it is enabled again."""
    receiver = await listen()
    created = await endpoint(api, receiver)
    receiver.statuses += [410]
    await ended(queue, make_submission)
    await delivery_pass(queue).run()
    disabled = (await api.get(f"/v1/webhooks/{created['id']}")).json()
    assert (disabled["enabled"], disabled["disabled_reason"]) == (False, "the endpoint responded with 410 Gone")
    await ended(queue, make_submission)
    assert await delivery_pass(queue).run() == 0

    assert (await api.patch(f"/v1/webhooks/{created['id']}", json={"enabled": True})).json()["disabled_reason"] is None
    await queue.webhooks.change_endpoint(
        "default",
        created["id"],
        lambda stored: stored.model_copy(update={"failing_since": stored.created_at_ms - DISABLED_AFTER_S * 1000 - 1}),
    )
    receiver.statuses += [500]
    await ended(queue, make_submission)
    await delivery_pass(queue).run()
    assert not (await queue.webhooks.endpoint("default", created["id"])).enabled


async def test_a_deleted_endpoint_receives_nothing(
    queue: Queue, api: httpx.AsyncClient, listen: Any, make_submission: Any
) -> None:
    receiver = await listen()
    created = await endpoint(api, receiver)
    await ended(queue, make_submission)
    await queue.webhooks.expand_outbox()
    assert (await api.delete(f"/v1/webhooks/{created['id']}")).status_code == 204
    await delivery_pass(queue).run()
    assert receiver.received == []
    ((delivery,), _) = await queue.webhooks.deliveries("default")
    assert (delivery.state, delivery.log[0].error) == (DeliveryState.FAILED, "the endpoint was deleted or disabled")


async def test_events_of_other_tenants_are_not_delivered(
    queue: Queue, api: httpx.AsyncClient, listen: Any, make_submission: Any
) -> None:
    receiver = await listen()
    created = await endpoint(api, receiver)
    await ended(queue, make_submission, tenant="other")
    assert await delivery_pass(queue).run() == 0
    with pytest.raises(Exception, match="no such webhook endpoint"):
        await queue.webhooks.endpoint("other", created["id"])


async def test_a_test_event_can_be_sent(queue: Queue, api: httpx.AsyncClient, listen: Any) -> None:
    receiver = await listen()
    created = await endpoint(api, receiver, events=["job.failed"])
    response = await api.post(f"/v1/webhooks/{created['id']}/test")
    assert response.status_code == 202
    await delivery_pass(queue).run()
    assert receiver.types == ["webhook.test"]
    (delivery,) = (await api.get(f"/v1/webhooks/deliveries?endpoint={created['id']}")).json()["data"]
    assert delivery["id"] == response.json()["delivery"]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://example.com/x", "must start with https"),
        ("http://10.0.0.1/x", "a private address"),
        ("http://169.254.169.254/latest", "a link-local address"),
        ("http://[::ffff:10.0.0.1]/", "a private address"),
        ("http://2130706433/", "neither a name nor an address"),
        ("http://0x7f.1/", "neither a name nor an address"),
        ("https://user:pass@example.com/", "user or password"),
    ],
)
async def test_urls_of_private_networks_are_refused(api: httpx.AsyncClient, url: str, message: str) -> None:
    """At the creation of an endpoint and at the submission of a job; rebinding is refused at delivery."""
    response = await api.post("/v1/webhooks", json={"url": url})
    assert (response.status_code, response.json()["error"]["param"]) == (422, "url")
    assert message in response.json()["detail"]
    response = await api.post("/v1/jobs", json={**BODY, "webhook": url})
    assert (response.status_code, response.json()["error"]["param"]) == (422, "webhook")


async def test_a_name_that_is_rebound_to_a_private_address_receives_nothing(
    queue: Queue, listen: Any, make_submission: Any
) -> None:
    """The address at the delivery is checked."""
    receiver = await listen()

    async def resolve(_host: str, _port: int) -> list[str]:
        return ["127.0.0.1"]

    webhook = JobWebhook(url=f"http://rebinding.test:{receiver.port}/hook", states=(State.SUCCEEDED,))
    await ended(queue, make_submission, webhook=webhook)
    rules = FetchRules(60.0, 65_536, ports=tuple(range(1, 65_536)), allow_http=True)
    await DeliveryPass(queue, FetchGuard(rules, resolve), "").run()
    assert receiver.received == []
    ((delivery,), _) = await queue.webhooks.deliveries("default")
    assert "a loopback address" in (delivery.log[0].error or "")


async def test_the_number_of_endpoints_is_bounded(api: httpx.AsyncClient, listen: Any) -> None:
    receiver = await listen()
    for _ in range(16):
        await endpoint(api, receiver)
    response = await api.post("/v1/webhooks", json={"url": receiver.url})
    assert (response.status_code, "delete one" in response.json()["detail"]) == (409, True)


async def test_the_outbox_is_expanded_in_steps_of_few_deliveries(queue: Queue) -> None:
    """A hundred events for sixteen endpoints each do not hold Redis for long; each delivery is created once."""
    keys, redis = queue.client.redis_keys, queue.client.redis
    for number in range(MAX_ENDPOINTS):
        await queue.webhooks.create_endpoint(
            "default",
            WebhookEndpoint(
                id=f"we_{number}",
                url=f"https://h{number}.test/hook",
                states=("succeeded",),
                secrets=(),
                created_at_ms=1,
            ),
        )
    for number in range(1, 101):
        event = {"event": f"{number}-1", "job": f"job_{number}", "state": "succeeded", "url": ""}
        await redis.xadd(keys.webhook_outbox("default"), event)
    await redis.zadd(keys.outbox_tenants, {"default": 1})
    ids: list[str] = []
    created, left = 0, 100
    while left:
        expanded = await queue.webhooks.expand_outbox(100)
        ids = await redis.zrange(keys.webhook_deliveries("default"), 0, -1)
        assert 1 <= len(ids) - created <= 128
        created, left = len(ids), left - expanded
        assert await redis.xlen(keys.webhook_outbox("default")) == left
    assert set(ids) == {f"{at}-1.we_{number}" for at in range(1, 101) for number in range(MAX_ENDPOINTS)}
