"""Loads, unloads and pins over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.http_server import serving

from shared.auth import Scope
from shared.queue import Queue, UnavailableModel, WorkerInfo

ACTIONS = ("load", "unload", "pin", "unpin")


@pytest.fixture
async def api(fake_queue: Queue, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    failure = UnavailableModel("no such file", permanent=True, retry_in_s=60.0)
    await fake_queue.workers.heartbeat(WorkerInfo("w1", ("demo",), kept=("demo",), worker_pool="big"))
    await fake_queue.workers.heartbeat(WorkerInfo("w2", ("demo",), unavailable={"demo": failure}))
    await fake_queue.workers.heartbeat(WorkerInfo("w3", ("other",)))
    async with serving(fake_queue, tmp_path) as client:
        yield client


async def order(api: httpx.AsyncClient, action: str, body: Any = None, status: int = 202) -> dict[str, Any]:
    response = await api.post(f"/v1/models/demo:{action}", **({} if body is None else {"json": body}))
    assert response.status_code == status, response.text
    found: dict[str, Any] = response.json()
    return found


async def test_an_order_is_listed_with_the_state_on_its_workers_and_logged(api: httpx.AsyncClient) -> None:
    made = await order(api, "load")
    states = [(one["worker"], one["worker_pool"], one["state"], one["reason"]) for one in made["workers"]]
    assert states == [("w1", "big", "kept", None), ("w2", "default", "failed", "no such file")]
    assert (await api.get("/v1/model-orders")).json()["data"] == [made]
    await order(api, "unload", {"worker_pool": "big"})
    listed = (await api.get("/v1/model-orders")).json()["data"]
    assert [(one["action"], one["worker_pool"]) for one in listed] == [("load", None), ("unload", "big")]
    logged = (await api.get("/v1/actions")).json()["data"]
    assert [(one["action"], one["target"], one["detail"]) for one in logged] == [
        ("unload", "model demo", "in worker pool big"),
        ("load", "model demo", "on all workers"),
    ]


async def test_a_pinned_model_is_not_unloaded_until_it_is_unpinned(api: httpx.AsyncClient) -> None:
    """A load changes nothing, and the pin is ended as it was set."""
    pinned = await order(api, "pin", {"worker_pool": "big"})
    refused = await order(api, "unload", status=409)
    assert "in worker pool big" in refused["error"]["message"]
    assert await order(api, "load", {"worker_pool": "big"}) == pinned
    missing = await order(api, "unpin", status=404)
    assert "it is pinned in worker pool big" in missing["error"]["message"]
    assert (await order(api, "unpin", {"worker_pool": "big"}))["action"] == "unpin"
    assert (await api.get("/v1/model-orders")).json()["data"] == []
    await order(api, "unload")


async def test_everyone_sees_on_how_many_workers_a_model_is_in_memory(
    api: httpx.AsyncClient, fake_queue: Queue
) -> None:
    await fake_queue.workers.heartbeat(WorkerInfo("w4", ("demo",), loaded=("demo",)))
    counts = {"loaded": 1, "loading": 0, "kept": 1, "failed": 1, "not_loaded": 0}
    assert (await api.get("/v1/models/demo")).json()["workers"] == counts
    assert [one["workers"] for one in (await api.get("/v1/models")).json()["data"]] == [counts]


async def test_pins_that_do_not_fit_are_refused(fake_queue: Queue, tmp_path: Path) -> None:
    sizes = {"demo": 6 * 2**30, "wide": 3 * 2**30}
    worker = WorkerInfo("w1", ("demo", "wide"), models_limit_bytes=8 * 2**30, model_bytes=sizes, worker_pool="big")
    await fake_queue.workers.heartbeat(worker)
    (tmp_path / "models.toml").write_text("".join(f'[[model]]\nid = "{one}"\nsource = "/none"\n' for one in sizes))
    async with serving(fake_queue, tmp_path, models=tmp_path / "models.toml") as api:
        await order(api, "pin")
        refused = await api.post("/v1/models/wide:pin")
        assert refused.status_code == 409
        assert "demo 6 GiB, wide 3 GiB" in refused.json()["error"]["message"]


async def test_bad_orders_name_what_is_wrong(api: httpx.AsyncClient) -> None:
    for path, body, status, param in (
        ("other:load", None, 404, "model"),
        ("demo:load", {"worker": "w9"}, 404, "worker"),
        ("demo:pin", {"worker_pool": "Big"}, 422, "worker_pool"),
        ("demo:pin", {"pool": "big"}, 422, "pool"),
        ("demo:pin", {"worker": "w1", "worker_pool": "big"}, 422, None),
        ("demo:unpin", None, 404, "model"),
    ):
        response = await api.post(f"/v1/models/{path}", **({} if body is None else {"json": body}))
        assert (response.status_code, response.json()["error"]["param"]) == (status, param), (path, body)
    assert (await api.get("/v1/model-orders")).json()["data"] == []


async def test_only_operators_order(fake_queue: Queue, tmp_path: Path) -> None:
    async with serving(fake_queue, tmp_path, auth="keys") as api:
        token, key = await fake_queue.api_keys.create("acme", frozenset((Scope.ADMIN,)))
        other, _ = await fake_queue.api_keys.create("acme", frozenset((Scope.JOBS_READ, Scope.JOBS_WRITE)))
        paths = [("POST", f"/v1/models/demo:{action}") for action in ACTIONS]
        for method, path in (*paths, ("GET", "/v1/model-orders")):
            refused = await api.request(method, path, headers={"Authorization": f"Bearer {other}"})
            assert refused.status_code == 403, path
        made = await api.post("/v1/models/demo:pin", headers={"Authorization": f"Bearer {token}"})
        assert made.json()["key_id"] == key.id
