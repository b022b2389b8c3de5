"""The deliveries of webhooks, in pages and one by one."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import httpx
from harness.http_server import bearer, serving

from shared.job import State
from shared.queue import Queue
from shared.queue.tenants.webhooks import DeliveryAttempt
from shared.webhooks import AttemptOutcome, DeliveryState, SigningSecret, WebhookEndpoint, new_secret

PATH = "/v1/webhooks/deliveries"


async def deliveries(queue: Queue, count: int, endpoint_id: str = "we_1", tenant: str = "default") -> list[str]:
    """Create deliveries of test events, and return their ids."""
    endpoint = WebhookEndpoint(
        id=endpoint_id,
        url="https://example.com/hook",
        states=(State.SUCCEEDED,),
        secrets=(SigningSecret(secret=new_secret()),),
        created_at_ms=0,
    )
    return [await queue.webhooks.send_test(tenant, endpoint, f"{endpoint_id}-{number}") for number in range(count)]


async def pages(api: httpx.AsyncClient, **params: Any) -> list[list[str]]:
    """Return the ids of all pages, following the cursor."""
    found = []
    while True:
        page = (await api.get(PATH, params=params)).json()
        found.append([one["id"] for one in page["data"]])
        if not page["has_more"]:
            return found
        params["after"] = page["next_cursor"]


async def test_deliveries_are_listed_in_pages(api: httpx.AsyncClient, fake_queue: Queue) -> None:
    ids = await deliveries(fake_queue, 5)
    whole = list(chain(*await pages(api)))
    assert sorted(whole) == sorted(ids)
    assert await pages(api, limit=2) == [whole[:2], whole[2:4], whole[4:]]
    assert await pages(api, limit=3, order="asc") == [whole[:1:-1], whole[1::-1]]


async def test_deliveries_are_filtered_by_state_and_endpoint(api: httpx.AsyncClient, fake_queue: Queue) -> None:
    ids, others = await deliveries(fake_queue, 3), await deliveries(fake_queue, 3, "we_2")
    outcome = AttemptOutcome(state=DeliveryState.DELIVERED)
    assert await fake_queue.webhooks.record_attempt(ids[0], outcome, DeliveryAttempt(at_ms=1, status=200))
    assert await pages(api, state="delivered") == [[ids[0]]]
    assert sorted(chain(*await pages(api, state="pending", limit=2))) == sorted(ids[1:] + others)
    assert sorted(chain(*await pages(api, endpoint="we_2", limit=1))) == sorted(others)
    refused = await api.get(PATH, params={"state": "lost"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (422, "state")


async def test_one_delivery_can_be_read_by_its_tenant_only(fake_queue: Queue, tmp_path: Path) -> None:
    (mine,), (other,) = await deliveries(fake_queue, 1, tenant="acme"), await deliveries(fake_queue, 1, "we_2", "other")
    async with serving(fake_queue, tmp_path, auth="keys") as api:
        api.headers.update(await bearer(fake_queue))
        assert (await api.get(f"{PATH}/{mine}")).json() == (await api.get(PATH)).json()["data"][0]
        for missing in (other, "nothing"):
            assert (await api.get(f"{PATH}/{missing}")).status_code == 404
