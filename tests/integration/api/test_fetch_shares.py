"""Image URLs in one API process: slow hosts of one tenant leave fetches and memory to others, and what clients read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from ipaddress import ip_network
from pathlib import Path

import httpx
import pytest
from harness.http_server import BODY, hosting, png, serving

from shared.errors import FetchFailed, Overloaded
from shared.inputs import fetch_guard, resolver
from shared.inputs.fetch_guard import FetchGuard, FetchRules
from shared.queue import Queue
from shared.runtime.shares import SharedPool, SharedTurns

LOOPBACK = (ip_network("127.0.0.0/8"),)
ALLOWED = {"fetch_allow_networks": LOOPBACK, "fetch_allow_http": True, "fetch_ports": tuple(range(1, 65_536))}

HEADS = {
    b"/body": b"HTTP/1.1 200 OK\r\ncontent-length: 20000000\r\n\r\n",
    b"/unknown": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
}
"""What the host sends of large images, of a declared and of an unknown length."""


@pytest.fixture
async def host() -> AsyncIterator[str]:
    async with hosting(HEADS) as url:
        yield url


async def in_use(pool: SharedPool, least: int) -> None:
    """Wait until tenants hold at least `least` units."""
    async with asyncio.timeout(30):
        while pool.size - pool.free < least:
            await asyncio.sleep(0.01)


def guard(tenant: str, timeout_s: float = 20.0) -> FetchGuard:
    rules = FetchRules(timeout_s, 20 * 2**20, ports=tuple(range(1, 65_536)), allow_http=True, networks=LOOPBACK)
    return FetchGuard(rules, tenant=tenant)


async def settle(tasks: list[asyncio.Task[bytes]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_slow_hosts_of_one_tenant_leave_fetches_to_others(host: str) -> None:
    """One tenant fetches 200 URLs that stall; another's fetch ends before them."""
    stalled = [asyncio.create_task(guard("greedy").get(f"{host}/slow")) for _ in range(200)]
    await in_use(fetch_guard.FETCHES._pool, 32)
    assert await guard("other").get(f"{host}/fast") == png()
    assert fetch_guard.FETCHES._pool.size - fetch_guard.FETCHES._pool.free >= 32, "the others are still stalled"
    await settle(stalled)


@pytest.mark.parametrize("path", ["body", "unknown"])
async def test_bodies_of_one_tenant_leave_memory_to_others(host: str, path: str) -> None:
    """20 MB are announced by 30 responses: two of them are received at once."""
    stalled = [asyncio.create_task(guard("greedy").get(f"{host}/{path}")) for _ in range(30)]
    pool = fetch_guard.FETCHED_BYTES._pool
    await in_use(pool, 40_000_000)
    assert await guard("other").get(f"{host}/fast") == png()
    assert 40_000_000 <= pool.size - pool.free <= 2 * 20 * 2**20
    await settle(stalled)
    assert pool.size == pool.free


async def test_a_fetch_over_the_share_waits_and_is_then_refused(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as a fault of the URL."""
    pool = SharedPool("image_fetches", 2)
    monkeypatch.setattr(fetch_guard, "FETCHES", SharedTurns(pool, max_waiting=4, timeout_s=0.2))
    stalled = asyncio.create_task(guard("a", 1.0).get(f"{host}/slow"))
    await in_use(pool, 1)
    with pytest.raises(Overloaded, match="image_fetches"):
        await guard("a").get(f"{host}/fast")
    monkeypatch.setattr(fetch_guard, "FETCHES", SharedTurns(pool, max_waiting=4, timeout_s=20))
    assert await guard("b").get(f"{host}/fast") == png()
    with pytest.raises(FetchFailed, match="no complete response within 1 s"):
        await stalled
    assert await guard("a").get(f"{host}/fast") == png()


async def test_a_body_is_held_until_it_is_stored(host: str) -> None:
    """Bodies that wait for a decoder count, too."""
    pool = fetch_guard.FETCHED_BYTES._pool
    async with guard("a").fetched(f"{host}/fast") as body:
        assert pool.size - pool.free == len(body)
    assert pool.size == pool.free


async def test_the_api_says_which_share_is_used(
    queue: Queue, tmp_path: Path, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As 503 with when to retry, and not as a fault of the image."""
    pool = SharedPool("image_fetches", 2)
    monkeypatch.setattr(fetch_guard, "FETCHES", SharedTurns(pool, max_waiting=4, timeout_s=0.1))
    assert pool.take("default", 1)
    async with serving(queue, tmp_path, **ALLOWED) as api:
        response = await api.post("/v1/jobs", json={**BODY, "image": f"{host}/fast"})
        assert response.status_code == 503, response.text
        assert int(response.headers["retry-after"]) > 0
        assert response.json()["code"] == "overloaded"
        pool.release("default", 1)
        accepted: httpx.Response = await api.post("/v1/jobs", json={**BODY, "image": f"{host}/fast"})
        assert accepted.status_code == 202, accepted.text


STATUS = {
    f"/{code}".encode(): f"HTTP/1.1 {code} X\r\ncontent-length: 0\r\n\r\n".encode() for code in (302, 404, 429, 503)
}


async def test_a_line_says_whether_the_url_of_its_image_can_respond_later(queue: Queue, tmp_path: Path) -> None:
    """A backfill submits a line with a retryable error again."""
    codes = {"url_not_fetched": ("slow", "429", "503"), "invalid_input_image": ("404", "302")}
    async with hosting(STATUS) as host, serving(queue, tmp_path, **ALLOWED, fetch_timeout_s=1.0) as api:

        async def check(path: str, code: str) -> None:
            line = json.dumps({**BODY, "image": f"{host}/{path}"})
            response = await api.post("/v1/jobs:bulk", content=line, headers={"Content-Type": "application/x-ndjson"})
            error, retryable = json.loads(response.text)["error"], code == "url_not_fetched"
            assert (error["code"], error["retryable"], error["param"]) == (code, retryable, "image"), (path, error)
            assert (await api.post("/v1/jobs", json={**BODY, "image": f"{host}/{path}"})).json()["code"] == code, path

        await asyncio.gather(*(check(path, code) for code, paths in codes.items() for path in paths))


async def test_a_webhook_is_not_created_while_the_share_of_lookups_is_in_use(queue: Queue, tmp_path: Path) -> None:
    """503, not an invalid URL."""
    held = 0
    while resolver.LOOKUPS.take("default", 1):
        held += 1
    try:
        async with serving(queue, tmp_path) as api:
            response = await api.post("/v1/webhooks", json={"url": "https://images.example/hook"})
        assert (response.status_code, response.json()["code"]) == (503, "overloaded")
    finally:
        for _ in range(held):
            resolver.LOOKUPS.release("default", 1)
