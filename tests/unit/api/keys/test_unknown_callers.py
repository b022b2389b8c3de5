"""Requests that no known key vouches for: signed URLs count for their tenant, and unknown keys get a share of Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.http_server import BODY, bearer, finish, serving

from api import auth
from api.auth import network_of
from shared.auth import TenantLimits, new_token
from shared.queue import Queue


@pytest.fixture
async def api(fake_queue: Queue, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(fake_queue, tmp_path, auth="keys", presign_expires_s=10**9) as client:
        yield client


async def test_a_signed_url_counts_against_the_rate_limit_of_its_tenant(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path
) -> None:
    """Otherwise its holder, or the tenant, could read without a limit."""
    mine, theirs = await bearer(fake_queue), await bearer(fake_queue, "other")
    urls = []
    for header in (mine, theirs):
        job_id = (await api.post("/v1/jobs", json=BODY, headers=header)).json()["id"]
        await finish(fake_queue, tmp_path, job_id)
        urls.append((await api.get(f"/v1/jobs/{job_id}", headers=header)).json()["artifacts"][0]["url"])
    await fake_queue.api_keys.set_limits("acme", TenantLimits(requests_per_minute=3))
    statuses = [(await api.get(urls[0])).status_code for _ in range(4)]
    assert statuses == [200, 200, 200, 429]
    refused = await api.get(urls[0])
    assert refused.json()["code"] == "rate_limit_exceeded"
    assert 0 < int(refused.headers["retry-after"]) <= 20
    assert "ratelimit" not in (await api.get(urls[1])).headers
    assert (await api.get(urls[1])).status_code == 200, "the other tenant has a limit of its own"


async def test_unknown_keys_leave_redis_to_known_ones(
    api: httpx.AsyncClient, fake_queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One address floods with well-formed keys while no read of one of them ends."""
    known = await bearer(fake_queue)
    assert (await api.get("/v1/models", headers=known)).status_code == 200
    (known_key,) = await fake_queue.api_keys.all()
    reads = most = 0
    identify, go_on = fake_queue.api_keys.identify, asyncio.Event()

    async def slow(key_id: str | None, tenant: str) -> Any:
        nonlocal reads, most
        reads += 1
        most = max(most, reads)
        try:
            if key_id != known_key.id:
                await go_on.wait()
            return await identify(key_id, tenant)
        finally:
            reads -= 1

    monkeypatch.setattr(fake_queue.api_keys, "identify", slow)
    monkeypatch.setattr(auth, "CACHE_S", 0.0)
    flood = [
        asyncio.create_task(api.get("/v1/models", headers={"Authorization": f"Bearer {new_token()}"}))
        for _ in range(300)
    ]
    async with asyncio.timeout(60):
        while reads < auth.UNKNOWN_READS // 2:  # the share of an address
            await asyncio.sleep(0.01)
        assert (await api.get("/v1/models", headers=known)).status_code == 200
    go_on.set()
    codes = [(response.status_code, response.json()["code"]) for response in await asyncio.gather(*flood)]
    assert set(codes) == {(401, "invalid_api_key"), (503, "overloaded")}
    assert codes.count((401, "invalid_api_key")) <= auth.MAX_UNKNOWN_PER_ADDRESS + auth.UNKNOWN_READS
    assert most <= auth.UNKNOWN_READS + 1, "and one for the known key"
    refused = next(task.result() for task in flood if task.result().status_code == 503)
    assert int(refused.headers["retry-after"]) > 0


async def test_addresses_without_a_known_key_take_turns(
    api: httpx.AsyncClient, fake_queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flood from one address delays the first request of a new key from another by one read, not by all."""
    first, ended = await bearer(fake_queue), 0
    identify = fake_queue.api_keys.identify

    async def slow(key_id: str | None, tenant: str) -> Any:
        nonlocal ended
        await asyncio.sleep(0.05)
        ended += 1
        return await identify(key_id, tenant)

    monkeypatch.setattr(fake_queue.api_keys, "identify", slow)
    flood = [
        asyncio.create_task(api.get("/v1/models", headers={"Authorization": f"Bearer {new_token()}"}))
        for _ in range(auth.MAX_UNKNOWN_PER_ADDRESS)
    ]
    await asyncio.sleep(0.01)
    transport = httpx.ASGITransport(api._transport.app, client=("198.51.100.1", 1))  # type: ignore[attr-defined]
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as other:
        assert (await other.get("/v1/models", headers=first)).status_code == 200
    assert ended <= 3 * auth.UNKNOWN_READS
    await asyncio.gather(*flood)


NETWORKS = [
    ("203.0.113.9", "203.0.113.9"),
    ("::ffff:203.0.113.9", "203.0.113.9"),
    ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
    ("fe80::1%eth0", "fe80::/64"),
    ("testclient", ""),
    ("", ""),
]


@pytest.mark.parametrize(("address", "network"), NETWORKS)
def test_addresses_of_one_client_are_one_network(address: str, network: str) -> None:
    assert network_of(address) == network


async def test_urls_are_signed_with_the_present_secret_after_redis_has_lost_the_first(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other API processes know only the present one."""
    mine = await bearer(fake_queue)
    job_id = (await api.post("/v1/jobs", json=BODY, headers=mine)).json()["id"]
    await finish(fake_queue, tmp_path, job_id)
    old = (await api.get(f"/v1/jobs/{job_id}", headers=mine)).json()["artifacts"][0]["url"]
    await fake_queue.client.redis.delete(fake_queue.client.redis_keys.url_secret)
    monkeypatch.setattr(auth, "SIGNER_S", 0.0)
    new = (await api.get(f"/v1/jobs/{job_id}", headers=mine)).json()["artifacts"][0]["url"]
    assert new != old
    assert (await api.get(new)).status_code == 200
    assert (await api.get(old)).json()["code"] == "invalid_signature"
