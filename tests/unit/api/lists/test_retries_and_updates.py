"""Retrying jobs, and changing the priority and deadline of queued ones: one, or all that match; also as an operator."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.http_server import BODY, WORKER, finish, png, serving, without_window

from api import retries
from api.routes import job_lists, matching_jobs
from shared.auth import Scope, TenantLimits
from shared.errors import FusequeueError, InvalidRequest, QueueFull
from shared.job import State
from shared.job_fields import Priority
from shared.job_record import Failure, Outcome
from shared.queue import Queue
from shared.queue.jobs import SubmitResult

CHANGES = [
    ("POST", "/v1/jobs:cancel", None),
    ("POST", "/v1/jobs:update", {"priority": "bulk"}),
    ("POST", "/v1/jobs:retry", None),
    ("DELETE", "/v1/jobs", None),
]


@pytest.fixture
async def api(fake_queue: Queue, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(fake_queue, tmp_path, models=without_window(tmp_path)) as client:
        yield client


async def submit(api: httpx.AsyncClient, count: int = 1, **fields: Any) -> list[str]:
    return [str((await api.post("/v1/jobs", json={**BODY, **fields})).json()["id"]) for _ in range(count)]


async def fail(queue: Queue, *job_ids: str) -> None:
    """Let a worker fail jobs."""
    error = Failure(code="inference_failed", message="broken")
    for claim in await queue.claims.claim(WORKER, ["demo"], 64):
        assert claim.job.id in job_ids
        assert await queue.claims.settle(WORKER, claim.job.id, claim.epoch, Outcome(state=State.FAILED, error=error))


async def send(api: httpx.AsyncClient, method: str, path: str, body: Any = None, **options: Any) -> httpx.Response:
    return await api.request(method, path, **({} if body is None else {"json": body}), **options)


async def test_a_queued_job_gets_a_priority_and_a_deadline(api: httpx.AsyncClient, fake_queue: Queue) -> None:
    waiting, job_id = await submit(api, 2)
    changed = await api.patch(f"/v1/jobs/{job_id}", json={"priority": "interactive", "deadline_s": 600})
    assert changed.status_code == 200
    assert changed.json()["priority"] == "interactive"
    assert changed.json()["deadline_at"] is not None
    again = (await api.patch(f"/v1/jobs/{job_id}", json={"priority": "interactive"})).json()
    assert (again["priority"], again["deadline_at"]) == ("interactive", changed.json()["deadline_at"])
    assert (await api.patch(f"/v1/jobs/{job_id}", json={"deadline_s": None})).json()["deadline_at"] is None
    (claim,) = await fake_queue.claims.claim(WORKER, ["demo"], 1)
    assert (claim.job.id, claim.job.priority) == (job_id, Priority.INTERACTIVE)
    assert (await api.get(f"/v1/jobs/{waiting}")).json()["priority"] == "standard"


async def test_only_queued_jobs_are_changed(api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path) -> None:
    (job_id,) = await submit(api)
    for body, param in (({}, "priority"), ({"priority": "high"}, "priority"), ({"seed": 1}, "seed")):
        refused = await api.patch(f"/v1/jobs/{job_id}", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (422, param)
    assert (await api.patch(f"/v1/jobs/{job_id}", json={"deadline_s": 0})).status_code == 422
    assert (await api.patch("/v1/jobs/job_00000000000000000000000000", json={"priority": "bulk"})).status_code == 404
    (claim,) = await fake_queue.claims.claim(WORKER, ["demo"], 1)
    for state in ("running", "succeeded"):
        refused = await api.patch(f"/v1/jobs/{job_id}", json={"priority": "bulk"})
        assert refused.status_code == 409
        assert f"job {job_id} is {state}; only queued jobs can be changed" in refused.json()["detail"]
        await fake_queue.claims.settle(WORKER, job_id, claim.epoch, Outcome(state=State.SUCCEEDED))


async def test_a_paused_job_counts_in_the_limit_of_queued_jobs_and_is_claimed_when_it_is_resumed(
    api: httpx.AsyncClient, fake_queue: Queue
) -> None:
    first, second = await submit(api, 2)
    paused = (await api.post(f"/v1/jobs/{first}/pause")).json()
    assert (paused["status"], paused["queue"]) == ("queued", {"position": None, "eta_s": None, "reason": "paused"})
    assert (await api.get(f"/v1/jobs/{first}")).json()["paused_at"] == paused["paused_at"] is not None
    listed = (await api.get("/v1/jobs", params={"order": "asc"})).json()["data"]
    assert [one["queue"]["reason"] for one in listed] == ["paused", None]
    tenant = (await fake_queue.jobs.get_many([first]))[0].job.tenant  # type: ignore[union-attr]
    await fake_queue.api_keys.set_limits(tenant, TenantLimits(queued_jobs=2))
    assert (await api.post("/v1/jobs", json=BODY)).status_code == 429
    (listed,) = (await api.get("/v1/tenants")).json()["data"]
    assert listed["use"]["queued_jobs"] == listed["limits"]["queued_jobs"] == 2
    assert [claim.job.id for claim in await fake_queue.claims.claim(WORKER, ["demo"], 8)] == [second]
    assert (await api.post(f"/v1/jobs/{first}/resume")).json()["paused_at"] is None
    assert [claim.job.id for claim in await fake_queue.claims.claim(WORKER, ["demo"], 8)] == [first]


async def test_queued_jobs_that_match_are_changed_in_order(
    api: httpx.AsyncClient, fake_queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_lists, "MAX_SCANNED", 2)
    monkeypatch.setattr(job_lists, "SCAN_PAGE_SIZE", 2)
    monkeypatch.setattr(matching_jobs, "MAX_SCANNED", 2)
    ids = await submit(api, 5, metadata={"set": "a"})
    others = await submit(api, 2, metadata={"set": "b"})
    params: dict[str, Any] = {"metadata.set": "a"}
    seen = []
    while True:
        piece = (await api.post("/v1/jobs:update", params=params, json={"priority": "bulk"})).json()
        seen += piece["ids"]
        if not piece["has_more"]:
            break
        params["after"] = piece["next_cursor"]
    assert seen == ids
    claims = await fake_queue.claims.claim(WORKER, ["demo"], 64)
    assert [claim.job.id for claim in claims] == others + ids
    assert [claim.job.priority for claim in claims] == [Priority.STANDARD] * 2 + [Priority.BULK] * 5


@pytest.mark.parametrize(("method", "path", "body"), CHANGES)
async def test_a_dry_run_counts_and_changes_nothing(
    api: httpx.AsyncClient, fake_queue: Queue, method: str, path: str, body: Any
) -> None:
    failed, canceled = await submit(api, 2)
    await api.post(f"/v1/jobs/{canceled}/cancel")
    await fail(fake_queue, failed)
    queued = await submit(api, 2)
    every = [failed, canceled, *queued]
    before = [(await api.get(f"/v1/jobs/{job_id}")).json() for job_id in every]
    expected = {"cancel": queued[::-1], "update": queued, "retry": [failed, canceled], "jobs": [canceled, failed]}
    params = {"model": "demo", "dry_run": "true"}
    would = (await send(api, method, path, body, params=params)).json()
    assert would["dry_run"] is True
    assert would["ids"] == expected[path.rpartition(":")[2].rpartition("/")[2]]
    assert would["skipped"] == 4 - len(would["ids"])
    assert [(await api.get(f"/v1/jobs/{job_id}")).json() for job_id in every] == before
    assert len((await api.get("/v1/jobs")).json()["data"]) == 4
    done = (await send(api, method, path, body, params={"model": "demo"})).json()
    assert (done["dry_run"], done["ids"]) == (False, would["ids"])


async def test_a_failed_job_is_retried_once_as_a_new_job(api: httpx.AsyncClient, fake_queue: Queue) -> None:
    (job_id,) = await submit(api, seed=7, batch_id="nightly", metadata={"order": "7"}, priority="bulk")
    assert (await api.post(f"/v1/jobs/{job_id}/retry")).status_code == 409
    await fail(fake_queue, job_id)
    first, second = [await api.post(f"/v1/jobs/{job_id}/retry") for _ in range(2)]
    assert (first.status_code, second.headers["idempotent-replayed"]) == (202, "true")
    new = first.json()
    assert first.headers["location"].endswith(new["id"])
    assert second.json()["id"] == new["id"] != job_id
    old = (await api.get(f"/v1/jobs/{job_id}")).json()
    same = ("prompt", "seed", "batch_id", "metadata", "priority", "model")
    assert {name: new[name] for name in same} == {name: old[name] for name in same}
    assert (old["status"], new["status"]) == ("failed", "queued")
    assert len((await api.get("/v1/jobs")).json()["data"]) == 2


async def test_jobs_that_match_are_retried_once_each(api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path) -> None:
    failed, canceled, done = await submit(api, 3)
    await api.post(f"/v1/jobs/{canceled}/cancel")
    await finish(fake_queue, tmp_path, done)
    await fake_queue.claims.release(WORKER, {})
    running = await fake_queue.jobs.get(failed)
    assert running is not None
    await fake_queue.claims.settle(WORKER, failed, running.epoch, Outcome(state=State.FAILED))
    first, second = [(await api.post("/v1/jobs:retry", params={"model": "demo"})).json() for _ in range(2)]
    assert (first["ids"], first["skipped"]) == ([failed, canceled], 1)
    assert list(first["new_ids"]) == [failed, canceled]
    assert second["new_ids"] == first["new_ids"]
    listed = (await api.get("/v1/jobs", params={"status": "queued", "order": "asc"})).json()["data"]
    assert [job["id"] for job in listed] == list(first["new_ids"].values())


async def test_a_retry_in_pieces_does_not_retry_its_own_jobs(
    api: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matching_jobs, "MAX_RETRIED", 1)
    ids = await submit(api, 3)
    retried: list[str] = []
    params = {"status": "canceled"}
    while len(retried) <= len(ids):
        await api.post("/v1/jobs:cancel", params={"status": "queued"})
        piece = (await api.post("/v1/jobs:retry", params=params)).json()
        retried += piece["ids"]
        if not piece["has_more"]:
            break
        params["after"] = piece["next_cursor"]
    assert retried == ids


async def test_a_retry_holds_its_input_images_or_says_that_they_are_gone(
    api: httpx.AsyncClient, fake_queue: Queue
) -> None:
    sent = await api.post("/v1/inputs", files={"file": ("a.png", png(), "image/png")})
    image = sent.json()["id"]
    job_id, gone = await submit(api, 2, image=image, strength=0.5)
    await api.post("/v1/jobs:cancel", params={"status": "queued"})
    new = (await api.post(f"/v1/jobs/{job_id}/retry")).json()
    assert new["image"]["id"] == image
    assert (await api.delete(f"/v1/inputs/{image}")).status_code == 409, "a queued job uses it"
    await api.post(f"/v1/jobs/{new['id']}/cancel")
    assert (await api.delete(f"/v1/inputs/{image}")).status_code == 204
    refused = await api.post(f"/v1/jobs/{gone}/retry")
    assert (refused.status_code, refused.json()["error"]["param"]) == (422, "image")
    piece = (await api.post("/v1/jobs:retry", params={"status": "canceled"})).json()
    assert piece["new_ids"] == {job_id: new["id"]}, "the retry before is repeated"
    assert piece["skipped"] == 2


async def test_a_job_with_presigned_urls_is_not_retried(api: httpx.AsyncClient) -> None:
    (job_id,) = await submit(api, output={"put_url": "https://bucket.example/image.png?signature=secret"})
    await api.post(f"/v1/jobs/{job_id}/cancel")
    refused = await api.post(f"/v1/jobs/{job_id}/retry")
    assert (refused.status_code, refused.json()["error"]["param"]) == (422, "output")
    assert (await api.post("/v1/jobs:retry", params={"status": "canceled"})).json()["skipped"] == 1


async def test_retries_count_for_the_quota_and_continue(api: httpx.AsyncClient, fake_queue: Queue) -> None:
    """A request that is refused has queued none: a repetition would retry them too."""
    ids = await submit(api, 3)
    await api.post("/v1/jobs:cancel", params={"status": "queued"})
    await fake_queue.api_keys.set_limits("default", TenantLimits(queued_jobs=2))
    params = {"status": "canceled"}
    piece = (await api.post("/v1/jobs:retry", params=params)).json()
    assert (piece["ids"], piece["has_more"]) == (ids[:2], True)
    refused = await api.post("/v1/jobs:retry", params=params | {"after": piece["next_cursor"]})
    assert (refused.status_code, refused.json()["code"]) == (429, "queue_full")
    await api.post("/v1/jobs:cancel", params={"status": "queued"})
    rest = (await api.post("/v1/jobs:retry", params=params | {"after": piece["next_cursor"]})).json()
    assert (rest["ids"], rest["has_more"]) == (ids[2:], False), "and none of the new jobs"


async def test_a_retry_whose_response_was_lost_does_not_retry_its_own_jobs(api: httpx.AsyncClient) -> None:
    """The Idempotency-Key keeps the end of the first request; other filters are another request."""
    ids = await submit(api, 2)
    await api.post("/v1/jobs:cancel", params={"status": "queued"})
    options: dict[str, Any] = {"params": {"status": "canceled"}, "headers": {"Idempotency-Key": "nightly"}}
    await api.post("/v1/jobs:retry", **{**options, "params": {"status": "canceled", "dry_run": "true"}})
    lost = (await api.post("/v1/jobs:retry", **options)).json()
    await api.post("/v1/jobs:cancel", params={"status": "queued"})
    repeated = (await api.post("/v1/jobs:retry", **options)).json()
    assert repeated["new_ids"] == lost["new_ids"]
    assert list(lost["new_ids"]) == ids
    other = await api.post("/v1/jobs:retry", **{**options, "params": {"model": "demo"}})
    assert (other.status_code, other.json()["code"]) == (422, "idempotency_key_reused")


NEW, AGAIN = SubmitResult(job_id="job_1", replayed=False), SubmitResult(job_id="job_1", replayed=True)
FULL, GONE = QueueFull("full", retry_after_s=1), InvalidRequest("gone")


@pytest.mark.parametrize(
    ("results", "handled"),
    [
        ([NEW, GONE, AGAIN], 3),
        ([NEW, FULL], 1),
        ([GONE, FULL], 1),
        ([FULL, NEW], 0),  # a smaller job within the quota: the next request has the end of this one
        ([FULL, AGAIN], None),
        ([FULL], None),
    ],
)
def test_a_refused_retry_ends_its_piece(results: list[SubmitResult | FusequeueError], handled: int | None) -> None:
    if handled is None:
        with pytest.raises(QueueFull):
            matching_jobs.handled_retries(results)
    else:
        assert matching_jobs.handled_retries(results) == handled


async def test_each_retry_keeps_its_result_where_those_before_fail_together(
    api: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_ids = await submit(api, 4)
    await api.post("/v1/jobs:cancel", params={"model": "demo"})
    submit_entries, faults = retries.submit_entries, [InvalidRequest("odd")]

    async def first_fails(*args: Any) -> Any:
        if faults:
            raise faults.pop()
        return await submit_entries(*args)

    monkeypatch.setattr(retries, "submit_entries", first_fails)
    monkeypatch.setattr(retries, "RETRIED_AT_ONCE", 2)
    piece = (await api.post("/v1/jobs:retry", params={"status": "canceled"})).json()
    assert (list(piece["new_ids"]), piece["skipped"], piece["next_cursor"]) == (job_ids[2:], 2, None)


@pytest.mark.parametrize(("method", "path", "body"), CHANGES)
async def test_operators_act_on_the_jobs_of_a_tenant_and_it_is_logged(
    fake_queue: Queue, tmp_path: Path, method: str, path: str, body: Any
) -> None:
    keys = {}
    for name, scopes in (("acme", {Scope.JOBS_READ, Scope.JOBS_WRITE}), ("ops", {Scope.ADMIN})):
        token, key = await fake_queue.api_keys.create(name, frozenset(scopes))
        keys[name] = {"Authorization": f"Bearer {token}"}
    async with serving(fake_queue, tmp_path, auth="keys") as api:
        _, canceled = [(await api.post("/v1/jobs", json=BODY, headers=keys["acme"])).json()["id"] for _ in range(2)]
        await api.post(f"/v1/jobs/{canceled}/cancel", headers=keys["acme"])
        for tenant, caller, status in (("acme", "acme", 403), ("ops", "acme", 403), ("a b", "ops", 422)):
            params = {"model": "demo", "tenant": tenant}
            refused = await send(api, method, path, body, params=params, headers=keys[caller])
            assert refused.status_code == status, refused.text
        params = {"model": "demo", "tenant": "acme"}
        dry = await send(api, method, path, body, params={**params, "dry_run": "1"}, headers=keys["ops"])
        assert (await api.get("/v1/actions", headers=keys["ops"])).json()["data"] == []
        done = await send(api, method, path, body, params=params, headers=keys["ops"])
        assert done.json()["ids"] == dry.json()["ids"] != []
        (entry,) = (await api.get("/v1/actions", headers=keys["ops"])).json()["data"]
        assert (entry["target"], entry["count"], entry["key_id"]) == ("tenant acme", 1, key.id)
        assert "model=demo" in entry["detail"]


async def test_operators_change_one_job_of_a_tenant(fake_queue: Queue, tmp_path: Path) -> None:
    async with serving(fake_queue, tmp_path, auth="keys") as api:
        owner, _ = await fake_queue.api_keys.create("acme", frozenset((Scope.JOBS_READ, Scope.JOBS_WRITE)))
        admin, _ = await fake_queue.api_keys.create("ops", frozenset((Scope.ADMIN, Scope.JOBS_WRITE)))
        headers = {"Authorization": f"Bearer {admin}"}
        job = await api.post("/v1/jobs", json=BODY, headers={"Authorization": f"Bearer {owner}"})
        url = f"/v1/jobs/{job.json()['id']}"
        assert (await api.patch(url, json={"priority": "bulk"}, headers=headers)).status_code == 404
        changed = await api.patch(url, json={"priority": "bulk"}, params={"tenant": "acme"}, headers=headers)
        assert changed.json()["priority"] == "bulk"
        assert (await api.post(f"{url}/pause", headers=headers)).status_code == 404
        assert (await api.post(f"{url}/cancel", params={"tenant": "acme"}, headers=headers)).status_code == 200
        assert (await api.post(f"{url}/retry", params={"tenant": "acme"}, headers=headers)).status_code == 202
        assert (await api.delete(url, params={"tenant": "acme"}, headers=headers)).status_code == 204
        entries = (await api.get("/v1/actions", headers=headers)).json()["data"]
        assert [entry["action"] for entry in entries] == ["delete", "retry", "cancel", "update"]
        assert {entry["target"] for entry in entries} == {job.json()["id"]}
