"""Keys and limits of tenants, against an API that requires keys."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from harness.http_server import application

from api import auth
from fusequeue import AsyncClient, InvalidArgument, NotFound, Unauthorized
from shared.auth import Scope
from shared.queue import Queue


@pytest.fixture
async def transport(
    fake_queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[httpx.ASGITransport]:
    """The API, which reads a key anew for each request."""
    monkeypatch.setattr(auth, "CACHE_S", 0.0)
    app = application(fake_queue, tmp_path, auth="keys")
    async with app.router.lifespan_context(app):
        yield httpx.ASGITransport(app, raise_app_exceptions=False)


@pytest.fixture
async def operator(fake_queue: Queue, transport: httpx.ASGITransport) -> AsyncIterator[AsyncClient]:
    token, _ = await fake_queue.api_keys.create("ops", frozenset((Scope.ADMIN, Scope.KEYS_CREATE)))
    async with AsyncClient("http://localhost", api_key=token, transport=transport) as client:
        yield client


async def test_a_key_works_until_it_is_revoked(operator: AsyncClient, transport: httpx.ASGITransport) -> None:
    """Its secret is in the response to `create` only."""
    made = await operator.keys.create("acme", scopes=["jobs:read"], name="laptop", expires_s=3600)
    (listed,) = [key async for key in operator.keys.list(tenant="acme")]
    assert (listed.id, listed.scopes, listed.name, listed.state) == (made.id, ("jobs:read",), "laptop", "active")
    assert made.key not in listed.model_dump_json()
    async with AsyncClient("http://localhost", api_key=made.key, transport=transport) as client:
        assert [job async for job in client.jobs()] == []
        with pytest.raises(Unauthorized, match="jobs:write"):
            await client.submit("demo", "a red circle")
        await operator.keys.revoke(listed)
        with pytest.raises(Unauthorized, match="revoked"):
            await client.group("nightly")
    assert [key.state async for key in operator.keys.list(tenant="acme", limit=1)] == ["revoked"]
    with pytest.raises(NotFound):
        await operator.keys.revoke("nope")
    with pytest.raises(InvalidArgument, match="expires_s"):
        await operator.keys.create("acme", expires_s=-1)


async def test_limits_are_changed_and_restored(operator: AsyncClient) -> None:
    """A limit that is left out stays."""
    await operator.operations.change_limits("acme", running_slots=8, kept_jobs=100)
    changed = await operator.operations.change_limits("acme", kept_jobs=None)
    assert (changed.tenant, changed.own_limits, changed.limits.running_slots) == ("acme", ("running_slots",), 8)
    (tenant,) = [one async for one in operator.operations.tenants(name="acme")]
    assert tenant.limits == changed.limits
