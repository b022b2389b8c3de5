"""Canceling and deleting jobs by batch or filter."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.http_server import BODY, bearer, finish, serving

from api.routes import job_lists, matching_jobs
from shared.job import State
from shared.queue import Queue


async def submit(api: httpx.AsyncClient, count: int = 1, **fields: Any) -> list[str]:
    return [str((await api.post("/v1/jobs", json={**BODY, **fields})).json()["id"]) for _ in range(count)]


async def states(queue: Queue, job_ids: list[str]) -> list[State | None]:
    return [None if record is None else record.state for record in await queue.jobs.get_many(job_ids)]


async def pieces(api: httpx.AsyncClient, method: str, path: str, **params: Any) -> list[list[str]]:
    """Repeat a request until it has handled all jobs, and return the changed jobs of each."""
    found = []
    while True:
        response = await api.request(method, path, params=params)
        assert response.status_code == 200, response.text
        found.append(response.json()["ids"])
        if not response.json()["has_more"]:
            return found
        params["after"] = response.json()["next_cursor"]


async def test_the_jobs_of_a_batch_are_canceled_and_no_others(api: httpx.AsyncClient, fake_queue: Queue) -> None:
    mine, others = await submit(api, 3, batch_id="b1"), await submit(api, 2, batch_id="b2")
    assert await pieces(api, "POST", "/v1/jobs:cancel", batch_id="b1") == [mine[::-1]]
    assert await states(fake_queue, mine + others) == [State.CANCELED] * 3 + [State.QUEUED] * 2
    again = (await api.post("/v1/jobs:cancel", params={"batch_id": "b1"})).json()
    assert (again["ids"], again["skipped"]) == ([], 3)


async def test_jobs_are_canceled_by_state_and_metadata(api: httpx.AsyncClient, fake_queue: Queue) -> None:
    (one,), (other,) = await submit(api, metadata={"order": "7"}), await submit(api, metadata={"order": "8"})
    params = {"metadata.order": "7", "status": "queued,running"}
    assert await pieces(api, "POST", "/v1/jobs:cancel", **params) == [[one]]
    assert await states(fake_queue, [one, other]) == [State.CANCELED, State.QUEUED]


async def test_a_request_changes_a_bounded_number_of_jobs(
    api: httpx.AsyncClient, fake_queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_lists, "MAX_SCANNED", 4)
    monkeypatch.setattr(matching_jobs, "MAX_SCANNED", 4)
    monkeypatch.setattr(job_lists, "SCAN_PAGE_SIZE", 2)
    monkeypatch.setattr(matching_jobs, "MAX_DELETED", 3)
    ids = await submit(api, 10, batch_id="b1", metadata={"order": "7"})
    kept = await submit(api, 3)
    for params in ({"batch_id": "b1"}, {"metadata.order": "7"}):
        canceled = await pieces(api, "POST", "/v1/jobs:cancel", **params)
        assert max(map(len, canceled)) <= 4
    assert set(await states(fake_queue, ids)) == {State.CANCELED}
    deleted = await pieces(api, "DELETE", "/v1/jobs", batch_id="b1")
    assert [len(piece) for piece in deleted] == [3, 3, 3, 1]
    assert list(chain(*deleted)) == ids[::-1]
    assert await states(fake_queue, [*ids, *kept]) == [None] * 10 + [State.QUEUED] * 3


async def test_deleting_takes_the_images_and_leaves_jobs_that_have_not_ended(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path
) -> None:
    (ended,) = await submit(api, batch_id="b1")
    await finish(fake_queue, tmp_path, ended)
    (waiting,) = await submit(api, batch_id="b1")
    assert list((tmp_path / "storage").rglob("*.png"))
    response = (await api.delete("/v1/jobs", params={"batch_id": "b1"})).json()
    assert (response["ids"], response["skipped"], response["has_more"]) == ([ended], 1, False)
    assert not list((tmp_path / "storage").rglob("*.png"))
    assert (await api.get(f"/v1/jobs/{ended}")).status_code == 404
    assert (await api.get(f"/v1/jobs/{waiting}")).status_code == 200


@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/jobs:cancel"), ("DELETE", "/v1/jobs")])
async def test_all_jobs_at_once_are_refused(api: httpx.AsyncClient, fake_queue: Queue, method: str, path: str) -> None:
    ids = await submit(api, 2)
    response = await api.request(method, path)
    assert (response.status_code, response.json()["error"]["param"]) == (422, "status")
    mistyped = await api.request(method, path, params={"batch": "b1"})
    assert (mistyped.status_code, mistyped.json()["error"]["param"]) == (422, "batch")
    assert await states(fake_queue, ids) == [State.QUEUED] * 2


async def test_filters_act_within_the_tenant(fake_queue: Queue, tmp_path: Path) -> None:
    keys = {tenant: await bearer(fake_queue, tenant) for tenant in ("acme", "other")}
    async with serving(fake_queue, tmp_path, auth="keys") as api:
        body = {**BODY, "batch_id": "b1", "metadata": {"order": "7"}}
        job_id = (await api.post("/v1/jobs", json=body, headers=keys["acme"])).json()["id"]
        for params in ({"batch_id": "b1"}, {"metadata.order": "7"}, {"status": "queued"}, {"model": "demo"}):
            response = await api.post("/v1/jobs:cancel", params=params, headers=keys["other"])
            assert response.json()["ids"] == []
        assert await states(fake_queue, [job_id]) == [State.QUEUED]
        await api.post("/v1/jobs:cancel", params={"batch_id": "b1"}, headers=keys["acme"])
        for params in ({"batch_id": "b1"}, {"status": "canceled"}):
            assert (await api.delete("/v1/jobs", params=params, headers=keys["other"])).json()["ids"] == []
        assert await states(fake_queue, [job_id]) == [State.CANCELED]
