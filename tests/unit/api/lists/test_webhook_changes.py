"""Requests that change one webhook endpoint, or its tenant's secrets, at the same moment."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from typing import Any

import httpx
import pytest

from shared.queue import Queue
from shared.queue.tenants.webhooks import MAX_ENDPOINTS

BODY = {"url": "https://93.184.216.34/hook"}


async def test_changes_at_the_same_moment_are_all_kept(api: httpx.AsyncClient, fake_queue: Queue) -> None:
    created = (await api.post("/v1/webhooks", json=BODY)).json()
    path = f"/v1/webhooks/{created['id']}"
    described, moved, rotated = await asyncio.gather(
        api.patch(path, json={"description": "images"}),
        api.patch(path, json={"events": ["job.failed"]}),
        api.post(f"{path}/rotate"),
    )
    assert [response.status_code for response in (described, moved, rotated)] == [200] * 3
    stored = await fake_queue.webhooks.endpoint("default", created["id"])
    assert (stored.description, stored.states) == ("images", ("failed",))
    assert [secret.secret for secret in stored.secrets] == [rotated.json()["secret"], created["secret"]]


async def test_rotations_at_the_same_moment_follow_one_another(api: httpx.AsyncClient, fake_queue: Queue) -> None:
    """Each returned secret was the current one: the other of the two signs as the previous one."""
    await api.get("/v1/webhooks/secret")
    responses = await asyncio.gather(*(api.post("/v1/webhooks/secret/rotate") for _ in range(2)))
    secrets = await fake_queue.webhooks.account_secrets("default")
    assert {response.json()["secret"] for response in responses} == {secret.secret for secret in secrets}


async def test_repeated_creations_at_the_same_moment_return_one_secret(api: httpx.AsyncClient) -> None:
    headers = {"Idempotency-Key": "one"}
    responses = await asyncio.gather(*(api.post("/v1/webhooks", json=BODY, headers=headers) for _ in range(4)))
    assert {response.status_code for response in responses} == {201}
    assert len({(response.json()["id"], response.json()["secret"]) for response in responses}) == 1
    assert sum(response.headers.get("Idempotent-Replayed") == "true" for response in responses) == 3


async def expire(queue: Queue, endpoint_id: str) -> None:
    await queue.webhooks.change_endpoint(
        "default", endpoint_id, lambda stored: stored.model_copy(update={"expires_at_ms": 1})
    )


async def test_an_endpoint_expires_unless_it_is_renewed(api: httpx.AsyncClient, fake_queue: Queue) -> None:
    created = (await api.post("/v1/webhooks", json={**BODY, "expires_s": 60})).json()
    path = f"/v1/webhooks/{created['id']}"
    created_at, expires_at = (datetime.fromisoformat(created[name]) for name in ("created_at", "expires_at"))
    assert timedelta(0) <= expires_at - created_at - timedelta(minutes=1) < timedelta(seconds=30)
    assert (await api.patch(path, json={"description": "a"})).json()["expires_at"] == created["expires_at"]
    assert (await api.patch(path, json={"expires_s": 3600})).json()["expires_at"] > created["expires_at"]
    await expire(fake_queue, created["id"])
    changes = [api.get(path), api.delete(path), api.patch(path, json={"expires_s": 60}), api.post(f"{path}/test")]
    assert [response.status_code for response in await asyncio.gather(*changes)] == [404] * 4
    assert (await api.get("/v1/webhooks")).json()["data"] == []
    assert (await api.post("/v1/webhooks", json=BODY)).json()["expires_at"] is None


@pytest.mark.parametrize("expires_s", [59, 0, -1, 30 * 86_400 + 1, 60.5, "60", True])
async def test_a_time_that_is_no_time_to_live_is_refused(api: httpx.AsyncClient, expires_s: Any) -> None:
    refused = await api.post("/v1/webhooks", json={**BODY, "expires_s": expires_s})
    assert (refused.status_code, refused.json()["error"]["param"]) == (422, "expires_s")


async def test_an_expired_endpoint_receives_nothing_and_takes_no_place(
    api: httpx.AsyncClient, fake_queue: Queue
) -> None:
    """The next event, or the next change of an endpoint, removes it."""
    keys, redis = fake_queue.client.redis_keys, fake_queue.client.redis
    ids = [(await api.post("/v1/webhooks", json=BODY)).json()["id"] for _ in range(MAX_ENDPOINTS)]
    for endpoint_id in ids[1:]:
        await expire(fake_queue, endpoint_id)
    another = (await api.post("/v1/webhooks", json={**BODY, "events": ["job.failed"]})).json()["id"]
    assert {name for name in await redis.hkeys(keys.webhook_endpoints("default")) if name != "*"} == {ids[0], another}
    job = (await api.post("/v1/jobs", json={"model": "demo", "prompt": "a red circle"})).json()["id"]
    await api.post(f"/v1/jobs/{job}/cancel")
    await expire(fake_queue, ids[0])
    assert await fake_queue.webhooks.expand_outbox() == 1
    assert await fake_queue.webhooks.deliveries("default") == ([], None)
    assert await redis.hgetall(keys.webhook_endpoints("default")) == {
        "*": "|failed|",
        another: (await redis.hget(keys.webhook_endpoints("default"), another)),
    }
