"""The connection that callers share: one for all, and its faults reach none of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from harness.tcp_proxy import TcpProxy, script_pattern

from shared.config.settings import Settings
from shared.queue import Queue, Submission
from shared.queue.connections import pools, shared_connection

Make = Callable[..., Submission]


@pytest.fixture
async def proxy(redis_server: Any) -> AsyncIterator[TcpProxy]:
    async with TcpProxy(redis_server.port) as running:
        yield running


@pytest.fixture
async def proxied(proxy: TcpProxy, queue: Queue, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Queue]:
    """The namespace of `queue` through the proxy, with short timeouts; its calls share a connection."""
    monkeypatch.setattr(pools, "COMMAND_TIMEOUT_S", 1.0)
    settings: Settings = queue.client.settings.model_copy(update={"redis_url": proxy.redis_url})
    proxied = Queue.connect(settings)
    await share(proxied, proxy)
    yield proxied
    await proxied.close()


async def share(queue: Queue, proxy: TcpProxy) -> None:
    """Wait until concurrent calls open no connection."""
    async with asyncio.timeout(10):
        while True:
            before = len(proxy.connections)
            await asyncio.gather(*(queue.jobs.get("job_none") for _ in range(before + 20)))
            if before and len(proxy.connections) == before:
                return
            await asyncio.sleep(0.05)


async def test_concurrent_calls_share_one_connection(proxied: Queue, make_submission: Make, proxy: TcpProxy) -> None:
    one = make_submission()
    await proxied.jobs.submit([one])  # a script that Redis does not know goes through the pool
    before = len(proxy.connections)
    records = await asyncio.gather(*(proxied.jobs.get(one.job.id) for _ in range(100 + before)))
    assert {record and record.job.id for record in records} == {one.job.id}
    assert len(proxy.connections) == before


@pytest.mark.parametrize("fault", ["cut", "silent"])
async def test_callers_get_their_replies_after_a_fault(
    proxied: Queue, make_submission: Make, proxy: TcpProxy, fault: Any
) -> None:
    """All commands that wait are sent again on other connections; a submit is applied once."""
    one = make_submission()
    proxy.drop_replies(script_pattern("submit", proxied.client.settings), then=fault)
    calls: list[Awaitable[Any]] = [proxied.jobs.submit([one]), *(proxied.jobs.get("job_none") for _ in range(5))]
    async with asyncio.timeout(10):
        (result,), *records = await asyncio.gather(*calls)
    assert proxy.dropped == 1
    assert result.job_id == one.job.id
    assert records == [None] * 5
    jobs, _ = await proxied.jobs.page(one.job.tenant)
    assert [record.job.id for record in jobs] == [one.job.id]


async def test_calls_share_a_new_connection_after_a_fault(proxied: Queue, proxy: TcpProxy) -> None:
    proxy.cut()
    await proxied.jobs.get("job_none")
    await share(proxied, proxy)


async def test_concurrent_calls_after_a_pause_open_one_connection(
    proxied: Queue, proxy: TcpProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that was idle for long is replaced, and its callers wait for the new one."""
    monkeypatch.setattr(shared_connection, "IDLE_S", 0.0)
    opened = proxy.opened
    assert (
        await asyncio.gather(*(proxied.jobs.get("job_none") for _ in range(pools.CONNECTIONS)))
        == [None] * pools.CONNECTIONS
    )
    assert proxy.opened - opened == 1


async def test_the_first_concurrent_calls_open_one_connection(queue: Queue, proxy: TcpProxy) -> None:
    first = Queue.connect(queue.client.settings.model_copy(update={"redis_url": proxy.redis_url}))
    await asyncio.gather(*(first.jobs.get("job_none") for _ in range(pools.CONNECTIONS)))
    assert proxy.opened == 1
    await first.close()


async def test_a_blocking_read_goes_on_after_its_connection_was_cut(proxied: Queue, proxy: TcpProxy) -> None:
    """The others of its kind, before and after, share one connection with it."""
    key = proxied.client.redis_keys.wakeup("w")
    opened = proxy.opened
    for _ in range(3):
        assert await proxied.wakeups.wait("w", 0.01) is None
    assert proxy.opened - opened == 1
    reading = asyncio.create_task(proxied.wakeups.wait("w", 2.0))
    await asyncio.sleep(0)
    proxy.cut()
    await proxied.client.redis.rpush(key, "0 signature")
    assert await reading == "0 signature"
    await proxied.client.redis.rpush(key, "1 signature")
    assert await proxied.wakeups.wait("w", 1.0) == "1 signature"
