"""Requests that change one webhook endpoint, or its tenant's secrets, at the same moment."""

from __future__ import annotations

import asyncio

import httpx

from shared.queue import Queue

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
