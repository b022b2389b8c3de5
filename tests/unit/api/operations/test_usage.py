"""Usage and tenants over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.http_server import BODY, WORKER, bearer, deliver, serving, without_window
from harness.tables import row

from shared.auth import Scope, TenantLimits
from shared.job import State
from shared.job_record import Outcome
from shared.queue import Queue


@pytest.fixture
async def api(fake_queue: Queue, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(fake_queue, tmp_path, models=without_window(tmp_path)) as client:
        yield client


async def settle(queue: Queue, seconds: float) -> None:
    (claim,) = await queue.claims.claim(WORKER, ["demo"], 1)
    outcome = Outcome(state=State.FAILED, device_seconds=seconds)
    assert await queue.claims.settle(WORKER, claim.job.id, claim.epoch, outcome)


async def usage(api: httpx.AsyncClient, headers: Any = None, **query: Any) -> list[dict[str, Any]]:
    response = await api.get("/v1/usage", params=query, headers=headers)
    assert response.status_code == 200, response.text
    page = response.json()
    assert (page["object"], page["has_more"], page["next_cursor"]) == ("list", False, None)
    return list(page["data"])


async def test_usage_is_that_of_the_jobs_that_ended(api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path) -> None:
    assert await usage(api) == []
    await api.post("/v1/jobs", json=BODY)
    (claim,) = await fake_queue.claims.claim(WORKER, ["demo"], 1)
    await deliver(fake_queue, tmp_path, claim)
    await api.post("/v1/jobs", json=BODY)
    await settle(fake_queue, 1.25)
    (row,) = await usage(api)
    today = (await fake_queue.usage.today()).isoformat()
    assert (row["object"], row["day"], row["tenant"], row["model"]) == ("usage", today, "default", "demo")
    assert row["jobs"] == {"succeeded": 1, "failed": 1, "canceled": 0, "expired": 0}
    assert (row["images"], row["videos"]) == (1, 0)
    assert row["device_seconds"] >= 1.25
    assert row["output_bytes"] > 0
    (whole,) = await usage(api, group_by="none")
    assert whole == {**row, "day": None, "tenant": None, "model": None}
    (by_model,) = await usage(api, group_by="model", **{"from": today, "to": today}, tenant="*", model="demo")
    assert by_model == {**whole, "model": "demo"}
    assert await usage(api, model="other") == []


async def test_a_key_reads_the_usage_of_its_own_tenant_and_an_operators_key_all(
    api: httpx.AsyncClient, fake_queue: Queue
) -> None:
    scopes = {"a": {Scope.JOBS_READ, Scope.JOBS_WRITE}, "b": {Scope.JOBS_WRITE, Scope.JOBS_READ}, "c": {Scope.ADMIN}}
    headers = {name: await bearer(fake_queue, name, own) for name, own in scopes.items()}
    headers["writes"] = await bearer(fake_queue, "a", [Scope.JOBS_WRITE])
    for name, seconds in (("a", 1.0), ("b", 2.0)):
        assert (await api.post("/v1/jobs", json=BODY, headers=headers[name])).status_code == 202
        await settle(fake_queue, seconds)

    async def seconds(caller: str, **query: str) -> dict[str, float]:
        rows = await usage(api, headers[caller], **query)
        return {row["tenant"]: row["device_seconds"] for row in rows}

    assert await seconds("a") == await seconds("a", tenant="a") == {"a": 1.0}
    assert await seconds("c") == {}
    assert await seconds("c", tenant="b") == {"b": 2.0}
    assert await seconds("c", tenant="*") == {"a": 1.0, "b": 2.0}
    for caller, query in (("a", {"tenant": "b"}), ("a", {"tenant": "*"}), ("writes", {})):
        assert (await api.get("/v1/usage", params=query, headers=headers[caller])).status_code == 403, (caller, query)
    assert (await api.get("/v1/tenants", headers=headers["a"])).status_code == 403
    listed = (await api.get("/v1/tenants", headers=headers["c"])).json()["data"]
    assert {one["id"]: one["usage"]["device_seconds"] for one in listed} == {"a": 1.0, "b": 2.0, "c": 0.0}


BAD_QUERIES = [
    ({"from": "yesterday"}, "from"),
    ({"to": "2026-13-01"}, "to"),
    ({"to": "0001-01-01"}, "to"),
    ({"from": "2026-02-01", "to": "2026-01-01"}, "from"),
    ({"from": "2024-01-01", "to": "2026-01-01"}, "from"),
    ({"group_by": "day,job"}, "group_by"),
    ({"group_by": "day,day"}, "group_by"),
    ({"group_by": ""}, "group_by"),
    ({"tenant": "A b"}, "tenant"),
    ({"after": "none"}, "after"),
    ({"limit": "0"}, "limit"),
    ({"first": "2026-01-01"}, "first"),
    ({"format": "csv"}, "format"),
]


async def test_bad_queries_name_what_is_wrong(api: httpx.AsyncClient) -> None:
    for query, param in BAD_QUERIES:
        with row(query):
            response = await api.get("/v1/usage", params=query)
            assert (response.status_code, response.json()["error"]["param"]) == (422, param)


async def test_usage_has_pages(api: httpx.AsyncClient, fake_queue: Queue) -> None:
    redis, keys, today = fake_queue.client.redis, fake_queue.client.redis_keys, await fake_queue.usage.today()
    for back in range(3):
        day = str((today - date(1970, 1, 1) - timedelta(days=back)).days)
        await redis.hset(keys.usage(day), "default|demo", "1,0,0,0,5,0,0,0,0,0")
        await redis.zadd(keys.usage_rows(day), {"default|demo": 0})
        await redis.expire(keys.usage(day), 60)
        await redis.expire(keys.usage_rows(day), 60)
    days, after = [], {}
    while True:
        page = (await api.get("/v1/usage", params={"limit": 1, **after})).json()
        days += [row["day"] for row in page["data"]]
        if not page["has_more"]:
            break
        after = {"after": page["next_cursor"]}
    assert days == [(today - timedelta(days=back)).isoformat() for back in (2, 1, 0)]


async def test_tenants_have_their_limits_and_their_use(api: httpx.AsyncClient, fake_queue: Queue) -> None:
    await fake_queue.api_keys.set_limits("acme", TenantLimits(queued_jobs=5, running_slots=2))
    await api.post("/v1/jobs", json=BODY)
    await settle(fake_queue, 1.5)
    for _ in range(2):
        await api.post("/v1/jobs", json=BODY)
    await fake_queue.claims.claim(WORKER, ["demo"], 1)
    acme, default = (await api.get("/v1/tenants")).json()["data"]
    assert (acme["id"], acme["own_limits"], acme["limits"]["queued_jobs"]) == (
        "acme",
        ["queued_jobs", "running_slots"],
        5,
    )
    assert acme["limits"]["kept_jobs"] == fake_queue.client.settings.max_kept_jobs_per_tenant
    assert (default["own_limits"], default["limits"]["running_slots"]) == ([], None)
    use = default["use"]
    assert (use["queued_jobs"], use["running_slots"], use["kept_jobs"]) == (1, 1, 3)
    assert use["recent_device_seconds"] > 0
    assert use["record_bytes"] > 0
    assert (default["usage"]["device_seconds"], default["usage"]["jobs"]["failed"]) == (1.5, 1)
    page = (await api.get("/v1/tenants", params={"limit": 1, "days": 7})).json()
    last = await fake_queue.usage.today()
    assert (page["first_day"], page["last_day"]) == ((last - timedelta(days=6)).isoformat(), last.isoformat())
    assert (page["has_more"], page["next_cursor"]) == (True, "acme")
    (second,) = (await api.get("/v1/tenants", params={"after": "acme"})).json()["data"]
    assert second["id"] == "default"
    assert [one["id"] for one in (await api.get("/v1/tenants", params={"name": "ac"})).json()["data"]] == ["acme"]
