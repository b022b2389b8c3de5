"""Groups over HTTP: their progress, and the changes of their jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.http_server import BODY, bearer, claimed, finish, serving

from shared.auth import Scope
from shared.job import State
from shared.job_record import Outcome
from shared.queue import Queue


async def submit(api: httpx.AsyncClient, count: int = 1, **fields: Any) -> list[str]:
    return [str((await api.post("/v1/jobs", json={**BODY, **fields})).json()["id"]) for _ in range(count)]


async def jobs_of(api: httpx.AsyncClient, name: str) -> dict[str, int]:
    group = (await api.get(f"/v1/groups/{name}")).json()
    assert group["total"] == sum(group["jobs"].values())
    return {state: count for state, count in group["jobs"].items() if count}


async def test_a_group_has_the_progress_of_its_jobs(api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path) -> None:
    (first, *_), others = await submit(api, 3, group="nightly.7"), await submit(api, 2)
    await finish(fake_queue, tmp_path, first)
    group = (await api.get("/v1/groups/nightly.7")).json()
    assert (group["object"], group["name"], group["total"]) == ("group", "nightly.7", 3)
    assert (group["jobs"]["succeeded"], group["jobs"]["failed"]) == (1, 0)
    assert group["first_submitted_at"] <= group["last_submitted_at"]
    assert group["rate_per_minute"] > 0
    assert group["eta_s"] > 0
    listed = (await api.get("/v1/groups")).json()
    assert [one["name"] for one in listed["data"]] == ["nightly.7"]
    jobs = (await api.get("/v1/jobs", params={"group": "nightly.7"})).json()["data"]
    assert {job["group"] for job in jobs} == {"nightly.7"}
    assert not {job["id"] for job in jobs} & set(others)


async def test_the_list_of_groups_has_pages(api: httpx.AsyncClient) -> None:
    for name in ("a", "b", "c"):
        await submit(api, group=name)
    first = (await api.get("/v1/groups", params={"limit": 2})).json()
    rest = (await api.get("/v1/groups", params={"limit": 2, "after": first["next_cursor"]})).json()
    assert (first["has_more"], rest["has_more"]) == (True, False)
    assert sorted(one["name"] for one in first["data"] + rest["data"]) == ["a", "b", "c"]


async def test_the_jobs_of_a_group_are_paused_resumed_canceled_and_retried(
    api: httpx.AsyncClient, fake_queue: Queue
) -> None:
    """And no others. A retry queues new jobs of the same group."""
    ids, (other,) = await submit(api, 3, group="a"), await submit(api, 1, group="b")
    params = {"group": "a"}
    paused = (await api.post("/v1/jobs:pause", params=params)).json()
    assert (sorted(paused["ids"]), paused["skipped"]) == (sorted(ids), 0)
    assert await jobs_of(api, "a") == {"paused": 3}
    assert (await api.post("/v1/jobs:pause", params=params)).json()["skipped"] == 3
    assert (await api.post("/v1/jobs:resume", params={**params, "dry_run": True})).json()["ids"] == ids
    assert (await api.post("/v1/jobs:resume", params=params)).json()["ids"] == ids
    assert await jobs_of(api, "a") == {"queued": 3}
    assert len((await api.post("/v1/jobs:cancel", params=params)).json()["ids"]) == 3
    assert len((await api.post("/v1/jobs:retry", params=params)).json()["new_ids"]) == 3
    assert await jobs_of(api, "a") == {"queued": 3, "canceled": 3}
    deleted = await api.delete("/v1/jobs", params={**params, "status": "canceled"})
    assert sorted(deleted.json()["ids"]) == sorted(ids)
    assert await jobs_of(api, "a") == {"queued": 3}
    record = await fake_queue.jobs.get(other)
    assert record is not None
    assert record.state is State.QUEUED


async def test_a_running_job_is_paused_and_an_ended_one_is_not(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path
) -> None:
    (ended,) = await submit(api, group="a")
    await finish(fake_queue, tmp_path, ended)
    (running,) = await submit(api, group="a")
    one = await claimed(fake_queue, running)
    changed = (await api.post("/v1/jobs:pause", params={"group": "a"})).json()
    assert (changed["ids"], changed["skipped"]) == ([running], 1)
    assert await jobs_of(api, "a") == {"succeeded": 1, "running": 1}
    await fake_queue.claims.settle("worker-of-the-test", running, one.epoch, Outcome(state=State.FAILED))
    assert await jobs_of(api, "a") == {"succeeded": 1, "failed": 1}


async def test_a_batch_and_a_group_can_both_be_named(api: httpx.AsyncClient) -> None:
    await submit(api, group="a", batch_id="b1"), await submit(api, group="a")
    (both,) = await submit(api, group="a", batch_id="b2")
    await submit(api, batch_id="b2")
    jobs = (await api.get("/v1/jobs", params={"group": "a", "batch_id": "b2"})).json()["data"]
    assert [job["id"] for job in jobs] == [both]


@pytest.mark.parametrize("name", ["", ".", "a b", "a/b", "a|b", "x" * 65, "-a", 7])
async def test_an_invalid_name_is_refused(api: httpx.AsyncClient, name: object) -> None:
    response = await api.post("/v1/jobs", json={**BODY, "group": name})
    assert (response.status_code, response.json()["error"]["param"]) == (422, "group")


async def test_an_unknown_group_is_not_found(api: httpx.AsyncClient) -> None:
    response = await api.get("/v1/groups/none")
    assert (response.status_code, response.json()["error"]["param"]) == (404, "group")
    assert (await api.get("/v1/groups")).json()["data"] == []


async def test_a_tenant_sees_its_own_groups_only(fake_queue: Queue, tmp_path: Path) -> None:
    """An operator names the tenant."""
    mine, other = (
        await bearer(fake_queue, "acme"),
        await bearer(fake_queue, "other", [Scope.JOBS_READ, Scope.JOBS_WRITE]),
    )
    async with serving(fake_queue, tmp_path, auth="keys") as api:
        await api.post("/v1/jobs", json={**BODY, "group": "a"}, headers=mine)
        assert (await api.get("/v1/groups", headers=other)).json()["data"] == []
        assert (await api.get("/v1/groups/a", headers=other)).status_code == 404
        assert (await api.get("/v1/groups?tenant=acme", headers=other)).status_code == 403
        for action in ("pause", "cancel"):
            assert (await api.post(f"/v1/jobs:{action}?group=a", headers=other)).json()["ids"] == []
        operator = await bearer(fake_queue, "operators", [Scope.ADMIN])
        named = (await api.get("/v1/groups?tenant=acme", headers=operator)).json()["data"]
        assert [(one["name"], one["jobs"]["queued"]) for one in named] == [("a", 1)]
        assert (await api.get("/v1/groups/a?tenant=acme", headers=operator)).json()["total"] == 1
