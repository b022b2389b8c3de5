"""One job over HTTP: submit, read, wait, cancel, delete."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.http_server import BODY, claimed, finish, serving

from api import responses
from api.chores.retention import sweep_chunk
from api.responses import QueuePositions
from shared.job import Phase
from shared.job_record import Progress
from shared.queue import ProgressReport, Queue, Submission, WorkerInfo
from shared.storage.folder import FolderStorage


async def test_a_job_is_accepted_with_all_its_defaults_resolved(api: httpx.AsyncClient) -> None:
    response = await api.post("/v1/jobs", json={**BODY, "metadata": {"order": "1"}})
    job = response.json()
    assert response.status_code == 202
    assert response.headers["location"] == job["urls"]["self"] == f"http://localhost/v1/jobs/{job['id']}"
    assert (job["object"], job["status"], job["model"], job["task"]) == ("job", "queued", "demo", "text_to_image")
    assert (job["width"], job["height"], job["steps"], job["guidance_scale"]) == (64, 64, 12, 2.0)
    assert isinstance(job["seed"], int)
    assert job["queue"] == {"position": 0, "eta_s": None, "reason": "no_worker"}
    assert job["metadata"] == {"order": "1"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", job["created_at"])
    assert int(response.headers["retry-after"]) >= 1


async def test_a_seed_of_minus_one_is_a_random_one(api: httpx.AsyncClient) -> None:
    """In every protocol, as in other services."""
    text = {"prompt": "a boat", "seed": -1}
    sent = {
        "/v1/jobs": {"model": "demo", **text},
        "/compat/fal/fusequeue/demo": text,
        "/compat/replicate/v1/models/fusequeue/demo/predictions": {"input": text},
    }
    for path, body in sent.items():
        for _ in range(2):
            assert (await api.post(path, json=body)).status_code in (200, 201, 202), path
    seeds = [job["seed"] for job in (await api.get("/v1/jobs")).json()["data"]]
    assert len({*seeds}) == 6
    assert min(seeds) >= 0
    refused = await api.post("/v1/jobs", json={"model": "demo", "prompt": "a boat", "seed": -2})
    assert (refused.status_code, refused.json()["errors"][0]["param"]) == (422, "seed")


async def test_reading_a_job_returns_the_accepted_job(api: httpx.AsyncClient) -> None:
    accepted = (await api.post("/v1/jobs", json=BODY)).json()
    read = await api.get(f"/v1/jobs/{accepted['id']}")
    assert read.status_code == 200
    assert read.json() == accepted


async def test_a_queued_job_has_its_position(api: httpx.AsyncClient) -> None:
    ids = [(await api.post("/v1/jobs", json=BODY)).json()["id"] for _ in range(3)]
    listed_positions = [(await api.get(f"/v1/jobs/{one}")).json()["queue"]["position"] for one in ids]
    assert listed_positions == [0, 1, 2]


async def test_polls_of_many_jobs_read_the_workers_once(
    fake_queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason needs the live workers; reading a thousand of them for each poll would cost 26 ms."""
    reads = 0

    async def counted() -> list[WorkerInfo]:
        nonlocal reads
        reads += 1
        return []

    monkeypatch.setattr(responses, "WORKERS_CACHE_S", 600.0)
    monkeypatch.setattr(fake_queue.workers, "all", counted)
    async with serving(fake_queue, tmp_path) as api:
        for _ in range(5):
            job_id = (await api.post("/v1/jobs", json=BODY)).json()["id"]
            await api.get(f"/v1/jobs/{job_id}")
    assert reads == 1


async def test_a_running_job_has_its_phase_and_progress(api: httpx.AsyncClient, fake_queue: Queue) -> None:
    job_id = (await api.post("/v1/jobs", json=BODY)).json()["id"]
    claim = await claimed(fake_queue, job_id)
    await fake_queue.claims.report_progress(
        ProgressReport(job_id, claim.epoch, Phase.DENOISING, Progress(step=3, total=12))
    )
    job = (await api.get(f"/v1/jobs/{job_id}")).json()
    assert (job["status"], job["phase"], job["queue"]) == ("running", "denoising", None)
    assert job["progress"] == {"step": 3, "total": 12, "percent": 25}
    assert job["started_at"] is not None


async def test_a_finished_job_has_the_urls_of_its_images(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path
) -> None:
    job_id = (await api.post("/v1/jobs", json={**BODY, "seed": 5})).json()["id"]
    await finish(fake_queue, tmp_path, job_id)
    response = await api.get(f"/v1/jobs/{job_id}")
    job = response.json()
    assert (job["status"], job["error"]) == ("succeeded", None)
    assert "retry-after" not in response.headers
    assert job["expires_at"] > job["finished_at"]
    (artifact,) = job["artifacts"]
    assert artifact["url"] == f"http://localhost/v1/jobs/{job_id}/artifacts/0"
    assert (artifact["seed"], artifact["content_type"], artifact["flagged"]) == (5, "image/png", False)
    assert "key" not in artifact


async def test_a_job_that_has_not_changed_is_not_sent_again(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path
) -> None:
    job_id = (await api.post("/v1/jobs", json=BODY)).json()["id"]
    etag = (await api.get(f"/v1/jobs/{job_id}")).headers["etag"]
    same = await api.get(f"/v1/jobs/{job_id}", headers={"If-None-Match": f'"other", W/{etag}'})
    assert (same.status_code, same.content, same.headers["etag"]) == (304, b"", etag)
    await finish(fake_queue, tmp_path, job_id)
    changed = await api.get(f"/v1/jobs/{job_id}", headers={"If-None-Match": etag})
    assert changed.status_code == 200
    assert changed.headers["etag"] != etag


async def test_a_waiting_submit_returns_the_finished_job(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path
) -> None:
    waiting = asyncio.ensure_future(api.post("/v1/jobs", json=BODY, headers={"Prefer": "respond-async, wait=20"}))
    await _any_claimed(fake_queue, tmp_path)
    response = await waiting
    assert (response.status_code, response.json()["status"]) == (200, "succeeded")
    assert response.headers["preference-applied"] == "wait=20"


async def test_a_waiting_submit_returns_202_after_its_wait(api: httpx.AsyncClient) -> None:
    began = asyncio.get_running_loop().time()
    response = await api.post("/v1/jobs", json=BODY, headers={"Prefer": "wait=1"})
    assert (response.status_code, response.json()["status"]) == (202, "queued")
    assert 0.9 < asyncio.get_running_loop().time() - began < 30


async def test_a_waiting_read_returns_as_soon_as_the_job_ends(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path
) -> None:
    job_id = (await api.post("/v1/jobs", json=BODY)).json()["id"]
    waiting = asyncio.ensure_future(api.get(f"/v1/jobs/{job_id}", params={"wait": 60}))
    await finish(fake_queue, tmp_path, job_id)
    response = await asyncio.wait_for(waiting, 30)
    assert response.json()["status"] == "succeeded"


async def test_waits_are_limited_by_the_settings(fake_queue: Queue, tmp_path: Path) -> None:
    async with serving(fake_queue, tmp_path, max_wait_s=1) as api:
        job_id = (await api.post("/v1/jobs", json=BODY)).json()["id"]
        response = await asyncio.wait_for(api.get(f"/v1/jobs/{job_id}", params={"wait": 500}), 30)
    assert response.json()["status"] == "queued"


async def test_the_same_key_and_body_return_the_same_job(api: httpx.AsyncClient) -> None:
    first = await api.post("/v1/jobs", json=BODY, headers={"Idempotency-Key": "k1"})
    again = await api.post("/v1/jobs", json=BODY, headers={"Idempotency-Key": "k1"})
    other = await api.post("/v1/jobs", json=BODY, headers={"Idempotency-Key": "k2"})
    assert again.json() == first.json()
    assert again.headers["idempotent-replayed"] == "true"
    assert "idempotent-replayed" not in first.headers
    assert other.json()["id"] != first.json()["id"]


async def test_a_replay_returns_the_current_job(api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path) -> None:
    first = await api.post("/v1/jobs", json=BODY, headers={"Idempotency-Key": "k1"})
    await finish(fake_queue, tmp_path, first.json()["id"])
    again = await api.post("/v1/jobs", json=BODY, headers={"Idempotency-Key": "k1"})
    assert (again.status_code, again.json()["status"]) == (200, "succeeded")


async def test_a_key_whose_job_was_deleted_makes_no_second_job(api: httpx.AsyncClient) -> None:
    first = (await api.post("/v1/jobs", json=BODY, headers={"Idempotency-Key": "k1"})).json()["id"]
    await api.post(f"/v1/jobs/{first}/cancel")
    await api.delete(f"/v1/jobs/{first}")
    again = await api.post("/v1/jobs", json=BODY, headers={"Idempotency-Key": "k1"})
    assert (again.status_code, again.json()["code"]) == (409, "conflict")
    assert first in again.json()["error"]["message"]
    assert (await api.get(f"/v1/jobs/{first}")).status_code == 404
    assert (await api.get("/v1/jobs")).json()["data"] == []


async def test_a_queued_job_is_canceled_at_once(api: httpx.AsyncClient) -> None:
    job_id = (await api.post("/v1/jobs", json=BODY)).json()["id"]
    response = await api.post(f"/v1/jobs/{job_id}/cancel")
    assert (response.status_code, response.json()["status"]) == (200, "canceled")
    assert (await api.post(f"/v1/jobs/{job_id}/cancel")).json()["status"] == "canceled"


async def test_a_running_job_is_marked_for_cancellation(api: httpx.AsyncClient, fake_queue: Queue) -> None:
    job_id = (await api.post("/v1/jobs", json=BODY)).json()["id"]
    await claimed(fake_queue, job_id)
    job = (await api.post(f"/v1/jobs/{job_id}/cancel")).json()
    assert (job["status"], job["cancel_requested"]) == ("running", True)


async def test_deleting_a_finished_job_deletes_its_images(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path
) -> None:
    job_id = (await api.post("/v1/jobs", json=BODY)).json()["id"]
    await finish(fake_queue, tmp_path, job_id)
    assert list((tmp_path / "storage").rglob("*.png"))
    assert (await api.delete(f"/v1/jobs/{job_id}")).status_code == 204
    assert not list((tmp_path / "storage").rglob("*.png"))
    assert (await api.get(f"/v1/jobs/{job_id}")).status_code == 404
    assert (await api.delete(f"/v1/jobs/{job_id}")).status_code == 404


async def test_images_of_a_job_deleted_in_an_outage_of_the_storage_are_deleted_after_it(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path
) -> None:
    job_id = (await api.post("/v1/jobs", json=BODY)).json()["id"]
    await finish(fake_queue, tmp_path, job_id)
    storage = FolderStorage(tmp_path / "storage", timeout_s=5)
    (tmp_path / "storage").rename(tmp_path / "away")
    (tmp_path / "storage").touch()
    assert (await api.delete(f"/v1/jobs/{job_id}")).status_code == 204
    assert (await api.get(f"/v1/jobs/{job_id}")).status_code == 404
    (tmp_path / "storage").unlink()
    (tmp_path / "away").rename(tmp_path / "storage")
    await fake_queue.client.redis.zadd(fake_queue.client.redis_keys.retention, {f"job|default|{job_id}||": 1}, xx=True)
    assert (await sweep_chunk(fake_queue, storage)).removed == 1
    assert not list((tmp_path / "storage").rglob("*.png"))


async def test_a_job_that_has_not_ended_is_not_deleted(api: httpx.AsyncClient) -> None:
    job_id = (await api.post("/v1/jobs", json=BODY)).json()["id"]
    response = await api.delete(f"/v1/jobs/{job_id}")
    assert (response.status_code, response.json()["code"]) == (409, "conflict")
    assert response.headers["x-should-retry"] == "false"
    assert (await api.get(f"/v1/jobs/{job_id}")).status_code == 200


async def test_urls_have_the_host_that_the_client_used(fake_queue: Queue, tmp_path: Path) -> None:
    forwarded = {"Host": "images.example:8080", "X-Forwarded-Host": "evil.example", "X-Forwarded-Proto": "https"}
    async with serving(fake_queue, tmp_path, auth="insecure-no-keys") as api:
        job = (await api.post("/v1/jobs", json=BODY, headers=forwarded)).json()
    assert job["urls"]["self"].startswith("http://images.example:8080/v1/jobs/")


async def test_urls_have_the_public_url_if_one_is_set(fake_queue: Queue, tmp_path: Path) -> None:
    async with serving(fake_queue, tmp_path, public_url="https://images.example/api/") as api:
        job = (await api.post("/v1/jobs", json=BODY)).json()
    assert job["urls"]["cancel"] == f"https://images.example/api/v1/jobs/{job['id']}/cancel"


async def test_a_submit_completes_when_its_client_disconnects(
    fake_queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, go_on = asyncio.Event(), asyncio.Event()
    submit = fake_queue.jobs.submit

    async def slow(submissions: Sequence[Submission], *, positions: bool) -> Any:
        reached.set()
        await go_on.wait()
        return await submit(submissions, positions=positions)

    monkeypatch.setattr(fake_queue.jobs, "submit", slow)
    async with serving(fake_queue, tmp_path) as api:
        leaving = asyncio.ensure_future(api.post("/v1/jobs", json=BODY))
        await reached.wait()
        leaving.cancel()
        await asyncio.wait({leaving})
        go_on.set()
        async with asyncio.timeout(30):
            while not (await fake_queue.jobs.page("default"))[0]:
                await asyncio.sleep(0.01)


async def test_polling_a_job_is_one_redis_command(
    fake_queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses, "POSITION_CACHE_S", 600.0)
    commands: list[str] = []
    execute: Callable[..., Awaitable[Any]] = fake_queue.client.redis.execute_command

    async def counted(*args: Any, **kwargs: Any) -> Any:
        commands.append(str(args[0]))
        return await execute(*args, **kwargs)

    async with serving(fake_queue, tmp_path) as api:
        job_id = (await api.post("/v1/jobs", json=BODY)).json()["id"]
        monkeypatch.setattr(fake_queue.client.redis, "execute_command", counted)
        await api.get(f"/v1/jobs/{job_id}")
        assert commands == ["HGETALL"], "while it is queued: its position is cached"
        await finish(fake_queue, tmp_path, job_id)
        commands.clear()
        await api.get(f"/v1/jobs/{job_id}")
        assert commands == ["HGETALL"]


async def test_queue_positions_are_cached_for_a_while_and_bounded(
    fake_queue: Queue, monkeypatch: pytest.MonkeyPatch, make_submission: Callable[..., Any]
) -> None:
    first, second = make_submission(), make_submission()
    await fake_queue.jobs.submit([first, second])
    monkeypatch.setattr(responses, "POSITION_CACHE_S", 600.0)
    monkeypatch.setattr(responses, "MAX_CACHED_POSITIONS", 3)
    kept = QueuePositions(fake_queue)

    async def position(cache: QueuePositions = kept) -> int | None:
        place = await cache.of(second.job.id, "demo")
        return None if place is None else place.position

    assert await position() == 1
    await fake_queue.jobs.cancel(first.job.id)
    assert await position() == 1, "cached"
    for number in range(3):
        await kept.of(f"job_{number}", "demo")
    assert await position() == 0, "the oldest of more than three is dropped"
    monkeypatch.setattr(responses, "POSITION_CACHE_S", 0.01)
    brief = QueuePositions(fake_queue)
    assert await position(brief) == 0
    await fake_queue.jobs.cancel(second.job.id)
    await asyncio.sleep(0.02)
    assert await position(brief) is None


async def _any_claimed(queue: Queue, folder: Path) -> None:
    async with asyncio.timeout(10):
        while not (listed := (await queue.jobs.page("default", limit=1))[0]):
            await asyncio.sleep(0.01)
    await finish(queue, folder, listed[0].job.id)
