"""Pauses and the action log over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.http_server import BODY, WORKER, serving

from shared.auth import Scope
from shared.queue import Queue
from shared.queue.maintenance import actions
from shared.queue.maintenance.actions import Action

PATHS = ["/v1/pauses/all", "/v1/pauses/models/demo", "/v1/pauses/tenants/default"]


async def logged(api: httpx.AsyncClient, **query: Any) -> list[tuple[str, str]]:
    page = (await api.get("/v1/actions", params=query)).json()
    return [(entry["action"], entry["target"]) for entry in page["data"]]


@pytest.mark.parametrize("path", PATHS)
async def test_a_paused_job_waits_and_says_why_until_it_is_resumed(
    api: httpx.AsyncClient, fake_queue: Queue, path: str
) -> None:
    paused = (await api.put(path, json={"reason": "a new driver"})).json()
    assert paused["reason"] == "a new driver"
    assert (await api.get("/v1/pauses")).json()["data"] == [paused]
    job = await api.post("/v1/jobs", json=BODY)
    assert job.status_code == 202
    assert job.json()["queue"]["reason"] == "paused"
    assert await fake_queue.claims.claim(WORKER, ["demo"], 64) == []
    assert (await api.delete(path)).status_code == 204
    assert (await api.get("/v1/pauses")).json()["data"] == []
    assert [one.job.id for one in await fake_queue.claims.claim(WORKER, ["demo"], 64)] == [job.json()["id"]]


async def test_bad_pauses_name_what_is_wrong(api: httpx.AsyncClient) -> None:
    for method, path, body, status, param in (
        ("PUT", "/v1/pauses/models/other", None, 404, "model"),
        ("PUT", "/v1/pauses/tenants/a%20b", None, 422, "tenant"),
        ("PUT", "/v1/pauses/all", {"reason": "x" * 201}, 422, "reason"),
        ("PUT", "/v1/pauses/all", {"reasons": "x"}, 422, "reasons"),
        ("DELETE", "/v1/pauses/all", None, 404, "name"),
        ("DELETE", "/v1/pauses/models/demo", None, 404, "name"),
    ):
        response = await api.request(method, path, **({} if body is None else {"json": body}))
        assert (response.status_code, response.json()["error"]["param"]) == (status, param), (method, path)
    assert (await api.put("/v1/pauses/all", content=b"{}", headers={"Content-Type": "text/plain"})).status_code == 415
    assert (await api.get("/v1/pauses")).json()["data"] == []
    assert await logged(api) == []


async def test_only_operators_pause_and_read_the_log(fake_queue: Queue, tmp_path: Path) -> None:
    async with serving(fake_queue, tmp_path, auth="keys") as api:
        token, key = await fake_queue.api_keys.create("acme", frozenset((Scope.ADMIN,)))
        other, _ = await fake_queue.api_keys.create("acme", frozenset((Scope.JOBS_READ, Scope.JOBS_WRITE)))
        for method, path in (*(("PUT", path) for path in PATHS), ("GET", "/v1/pauses"), ("GET", "/v1/actions")):
            refused = await api.request(method, path, headers={"Authorization": f"Bearer {other}"})
            assert refused.status_code == 403, path
        headers = {"Authorization": f"Bearer {token}"}
        assert (await api.put(PATHS[2], headers=headers)).json()["key_id"] == key.id
        (entry,) = (await api.get("/v1/actions", headers=headers)).json()["data"]
        assert (entry["action"], entry["target"], entry["key_id"]) == ("pause", "tenant default", key.id)


async def test_the_log_has_what_operators_did_newest_first(api: httpx.AsyncClient) -> None:
    await api.put("/v1/pauses/all")
    await api.put("/v1/pauses/models/demo")
    await api.delete("/v1/pauses/all")
    expected = [("resume", "everything"), ("pause", "model demo"), ("pause", "everything")]
    assert await logged(api) == expected
    first = (await api.get("/v1/actions", params={"limit": 2})).json()
    assert first["has_more"]
    assert await logged(api, after=first["next_cursor"]) == expected[2:]
    assert (await api.get("/v1/actions", params={"after": "no"})).json()["error"]["param"] == "after"


async def test_the_log_is_bounded(fake_queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actions, "MAX_ACTIONS", 10)
    for number in range(300):
        await fake_queue.actions.record(Action("purge", str(number)))
    entries, _ = await fake_queue.actions.page(None, 1000)
    assert 10 <= len(entries) <= 200  # nodes of a stream are deleted whole
    assert entries[0].action.target == "299"
