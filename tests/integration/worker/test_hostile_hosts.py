"""Webhooks to hosts that stall or answer with anything: each attempt is bounded, and other tenants' arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from ipaddress import ip_network
from typing import Any

import pytest
from harness.queue import claim, end, put, redis_ms

from api.chores import webhooks
from api.chores.webhooks import DeliveryPass
from shared.inputs.fetch_guard import FetchGuard, FetchRules
from shared.job import State
from shared.job import Webhook as JobWebhook
from shared.queue import Queue
from shared.runtime.asyncio_tools import cancel_and_wait
from shared.webhooks import DeliveryState

LOOPBACK = (ip_network("127.0.0.0/8"),)
OK = b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n"
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Host:
    """A server of raw bytes; counts the requests."""

    def __init__(self, serve: Serve) -> None:
        self.requests = 0
        self.port = 0
        self._serve = serve
        self._tasks: set[asyncio.Task[Any]] = set()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await reader.readuntil(b"\r\n\r\n")
            self.requests += 1
            await self._serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def listening(serve: Serve) -> AsyncIterator[Host]:
    host = Host(serve)
    server = await asyncio.start_server(host.handle, "127.0.0.1", 0)
    host.port = server.sockets[0].getsockname()[1]
    try:
        yield host
    finally:
        server.close()
        await host.stop()


async def stall(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(OK)
    await writer.drain()


async def at_loopback(host: str, port: int) -> Sequence[str]:
    return ["127.0.0.1"]


def delivery_pass(queue: Queue, timeout_s: float) -> DeliveryPass:
    allowed = {"ports": tuple(range(1, 65_536)), "allow_http": True, "networks": LOOPBACK}
    rules = replace(FetchRules.for_webhooks(queue.client.settings), timeout_s=timeout_s, **allowed)
    return DeliveryPass(queue, FetchGuard(rules, at_loopback), "")


async def event(queue: Queue, make_submission: Any, tenant: str, url: str) -> None:
    """End a job of `tenant` with the webhook `url`."""
    await put(queue, make_submission(tenant=tenant, webhook=JobWebhook(url=url, states=(State.SUCCEEDED,))))
    assert await end(queue, (await claim(queue))[0])


@asynccontextmanager
async def running(deliveries: DeliveryPass) -> AsyncIterator[None]:
    """Run passes one after the other, as the schedule does."""

    async def repeat() -> None:
        while True:
            await deliveries.run()
            await asyncio.sleep(0.05)

    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        await cancel_and_wait((task,))


async def test_stalling_hosts_of_one_tenant_leave_slots_to_others(
    queue: Queue, make_submission: Any, eventually: Callable[..., Awaitable[None]]
) -> None:
    """Twenty hosts stall, with four deliveries each: more than all slots. Another tenant's delivery arrives at once."""
    async with listening(stall) as dead, listening(accept) as alive:
        for number in range(80):
            await event(queue, make_submission, "greedy", f"http://h{number % 20}.test:{dead.port}/")
        async with running(delivery_pass(queue, timeout_s=60)):
            await eventually(lambda: dead.requests >= webhooks.SLOTS // 2, "the tenant uses its share", 20)
            await event(queue, make_submission, "other", f"http://alive.test:{alive.port}/")
            await eventually(lambda: alive.requests == 1, "the other tenant's delivery arrives", 10)
            assert dead.requests <= webhooks.SLOTS // 2


@pytest.mark.parametrize("stalls", [True, False])
@pytest.mark.parametrize(
    ("status", "state"), [("200 OK", DeliveryState.DELIVERED), ("503 Busy", DeliveryState.PENDING)]
)
async def test_the_head_of_a_response_decides(
    queue: Queue, make_submission: Any, stalls: bool, status: str, state: DeliveryState
) -> None:
    """Its body stalls, or breaks off."""

    async def head_only(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 {status}\r\ncontent-length: 100\r\n\r\nhalf of".encode())
        await writer.drain()
        if stalls:
            await stall(reader, writer)

    async with listening(head_only) as host:
        await event(queue, make_submission, "default", f"http://hooks.test:{host.port}/")
        async with asyncio.timeout(20):
            assert await delivery_pass(queue, timeout_s=60).run() == 1
    ((delivery,), _) = await queue.webhooks.deliveries("default")
    assert (delivery.state, delivery.log[0].status, delivery.log[0].error) == (state, int(status[:3]), None)


async def test_a_pass_does_not_wait_for_its_slowest_delivery(
    queue: Queue, make_submission: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A delivery in progress at the end of a pass continues during the next one."""
    monkeypatch.setattr(webhooks, "BUDGET_S", 0.2)
    release = asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        await accept(reader, writer)

    async with listening(slow) as host, listening(accept) as alive:
        await event(queue, make_submission, "greedy", f"http://slow.test:{host.port}/")
        deliveries = delivery_pass(queue, timeout_s=60)
        async with asyncio.timeout(20):
            assert await deliveries.run() == 1
            await event(queue, make_submission, "other", f"http://alive.test:{alive.port}/")
            assert await deliveries.run() == 1
            assert (host.requests, alive.requests) == (1, 1)
            release.set()
            await deliveries.drain()
        ((delivery,), _) = await queue.webhooks.deliveries("greedy")
        assert delivery.state is DeliveryState.DELIVERED


async def test_a_flood_of_hosts_hides_no_other_tenant(queue: Queue, make_submission: Any) -> None:
    """A thousand hosts of one tenant are due before another tenant's delivery, which is claimed first all the same."""
    redis, keys = queue.client.redis, queue.client.redis_keys
    for number in range(1000):
        entry = {"event": f"{number + 1}-1", "job": "", "state": "succeeded"}
        await redis.xadd(keys.webhook_outbox("greedy"), {**entry, "url": f"https://h{number}.test/"})
    await redis.zadd(keys.outbox_tenants, {"greedy": 1})
    while await queue.webhooks.expand_outbox():
        pass
    await event(queue, make_submission, "other", "https://other.test/")
    while await queue.webhooks.expand_outbox():
        pass
    first = await queue.webhooks.claim_deliveries(64, 4, {}, 60_000)
    tenants = [due.delivery.tenant for due in first]
    assert tenants.count("other") == 1
    assert 16 <= tenants.count("greedy") <= 32
    running = {("greedy", f"h{number}.test"): 1 for number in range(32)}
    await event(queue, make_submission, "other", "https://other.test/")
    await queue.webhooks.expand_outbox()
    (one,) = await queue.webhooks.claim_deliveries(64, 4, running, 60_000)
    assert one.delivery.tenant == "other"


async def test_a_flood_of_events_delays_no_other_tenant(queue: Queue, make_submission: Any) -> None:
    """5,000 events of one tenant are in the outbox; another tenant's becomes a delivery in the second step."""
    redis, keys = queue.client.redis, queue.client.redis_keys
    async with redis.pipeline(transaction=False) as pipe:
        for number in range(5000):
            entry = {"event": f"{number + 1}-1", "job": "", "state": "succeeded"}
            pipe.xadd(keys.webhook_outbox("greedy"), {**entry, "url": "https://greedy.test/"})
        await pipe.execute()
    await redis.zadd(keys.outbox_tenants, {"greedy": 1})
    await event(queue, make_submission, "other", "https://other.test/")
    for _ in range(2):
        assert await queue.webhooks.expand_outbox() > 90
    assert len((await queue.webhooks.deliveries("other"))[0]) == 1
    while await queue.webhooks.expand_outbox():
        pass
    assert await redis.zcard(keys.webhook_deliveries("greedy")) == 5000
    assert not await redis.exists(keys.outbox_tenants, keys.webhook_outbox("greedy"), keys.webhook_outbox("other"))


async def test_deliveries_of_a_killed_sender_come_again_soon(queue: Queue, make_submission: Any) -> None:
    """After the timeout of an attempt and a few seconds."""
    async with listening(stall) as host:
        await event(queue, make_submission, "default", f"http://dead.test:{host.port}/")
        sender = asyncio.create_task(delivery_pass(queue, timeout_s=20).run())
        while not host.requests:
            await asyncio.sleep(0.01)
        await cancel_and_wait((sender,))
        keys = queue.client.redis_keys
        ((_, due_ms),) = await queue.client.redis.zrange(keys.webhook_tenants, 0, -1, withscores=True)
        assert 20_000 < due_ms - await redis_ms(queue) < 31_000


async def test_the_oldest_deliveries_of_a_tenant_are_dropped(queue: Queue, make_submission: Any) -> None:
    """50,000 are kept: a tenant cannot fill Redis with events that no one receives."""
    redis, keys = queue.client.redis, queue.client.redis_keys
    await event(queue, make_submission, "default", "https://old.test/")
    await queue.webhooks.expand_outbox()
    ((old,), _) = await queue.webhooks.deliveries("default")
    log = keys.webhook_deliveries("default")
    now = await redis_ms(queue)
    await redis.zadd(log, {old.id: 1, **{f"{number}-1.job": now for number in range(49_999)}})
    await event(queue, make_submission, "default", "https://new.test/")
    await queue.webhooks.expand_outbox()
    assert await redis.zcard(log) == 50_000
    assert not await redis.exists(keys.webhook_delivery(old.id))
    assert await redis.zrange(keys.webhook_hosts("default"), 0, -1) == ["new.test"]


async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    for byte in b"HTTP/1.1 200 OK\r\n" + b"x-header: value\r\n" * 1000:
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(0.02)


async def endless_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"10000\r\n" + bytes(65_536) + b"\r\n")
        await writer.drain()


async def endless_interim(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n" * 100)
        await writer.drain()


def replying(raw: bytes) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(raw)
        await writer.drain()

    return serve


HOSTILE: dict[str, tuple[Serve, DeliveryState]] = {
    "byte by byte": (drip, DeliveryState.PENDING),
    "an endless body": (endless_body, DeliveryState.DELIVERED),
    "endless interim responses": (endless_interim, DeliveryState.PENDING),
    "a redirect": (
        replying(b"HTTP/1.1 307 T\r\nlocation: http://127.0.0.1/\r\ncontent-length: 0\r\n\r\n"),
        DeliveryState.PENDING,
    ),
    "a header of a megabyte": (replying(b"HTTP/1.1 200 OK\r\nx: " + b"a" * 2**20), DeliveryState.PENDING),
    "a million headers": (replying(b"HTTP/1.1 200 OK\r\n" + b"a:b\r\n" * 10**6), DeliveryState.PENDING),
    "a length of 5,000 digits": (
        replying(b"HTTP/1.1 200 OK\r\ncontent-length: " + b"9" * 5000 + b"\r\n\r\n"),
        DeliveryState.PENDING,
    ),
    "a superscript in Retry-After": (
        replying(b"HTTP/1.1 429 T\r\nretry-after: \xb2\r\ncontent-length: 0\r\n\r\n"),
        DeliveryState.PENDING,
    ),
    "an infinite Retry-After": (
        replying(b"HTTP/1.1 429 T\r\nretry-after: " + b"9" * 400 + b"\r\ncontent-length: 0\r\n\r\n"),
        DeliveryState.PENDING,
    ),
    "no HTTP": (replying(bytes(range(256)) * 10), DeliveryState.PENDING),
    "a surrogate in the status": (
        replying(b"HTTP/1.1 200 \xed\xa0\x80\r\ncontent-length: 0\r\n\r\n"),
        DeliveryState.DELIVERED,
    ),
    "a wrong length": (replying(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc"), DeliveryState.DELIVERED),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_any_answer_of_a_host_is_one_bounded_attempt(queue: Queue, make_submission: Any, name: str) -> None:
    """It is recorded with its error, and another tenant's delivery of the same pass arrives."""
    serve, state = HOSTILE[name]
    async with listening(serve) as host, listening(accept) as alive:
        await event(queue, make_submission, "hostile", f"http://hostile.test:{host.port}/")
        await event(queue, make_submission, "other", f"http://alive.test:{alive.port}/")
        async with asyncio.timeout(30):
            assert await delivery_pass(queue, timeout_s=1.5).run() == 2
        assert alive.requests == 1
        ((delivery,), _) = await queue.webhooks.deliveries("hostile")
        assert (delivery.state, delivery.attempts) == (state, 1)
        ((other,), _) = await queue.webhooks.deliveries("other")
        assert other.state is DeliveryState.DELIVERED
