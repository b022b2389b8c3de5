"""Idempotency-Key on the routes that create something other than a job."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.http_server import bearer, finish, serving

from api.protocols.openai import file_routes as files
from shared.errors import StorageUnavailable
from shared.queue import Queue
from shared.storage.folder import FolderStorage

Create = Callable[[httpx.AsyncClient, str, str], Coroutine[Any, Any, httpx.Response]]
LINE = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/jobs", "body": {"model": "demo", "prompt": "x"}})


async def create_file(api: httpx.AsyncClient, name: str, key: str) -> httpx.Response:
    files = {"file": (f"{name}.jsonl", LINE.encode(), "application/jsonl")}
    return await api.post("/v1/files", files=files, data={"purpose": "batch"}, headers={"Idempotency-Key": key})


async def create_batch(api: httpx.AsyncClient, name: str, key: str) -> httpx.Response:
    listed = (await api.get("/v1/files")).json()["data"]
    file_id = listed[0]["id"] if listed else (await create_file(api, "lines", "of-the-file")).json()["id"]
    body = {"input_file_id": file_id, "endpoint": "/v1/jobs", "completion_window": "24h", "metadata": {"name": name}}
    return await api.post("/v1/batches", json=body, headers={"Idempotency-Key": key})


async def create_webhook(api: httpx.AsyncClient, name: str, key: str) -> httpx.Response:
    body = {"url": "https://93.184.216.34/hook", "description": name}
    return await api.post("/v1/webhooks", json=body, headers={"Idempotency-Key": key})


async def create_prediction(api: httpx.AsyncClient, name: str, key: str) -> httpx.Response:
    path, body = "/compat/replicate/v1/models/any/demo/predictions", {"input": {"prompt": name}}
    return await api.post(path, json=body, headers={"Idempotency-Key": key})


CREATE = [create_file, create_batch, create_webhook, create_prediction]


@pytest.fixture
async def api(fake_queue: Queue, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(fake_queue, tmp_path, auth="keys") as client:
        client.headers.update(await bearer(fake_queue, "acme"))
        yield client


@pytest.mark.parametrize("create", CREATE)
async def test_a_key_is_one_object_of_its_tenant(api: httpx.AsyncClient, fake_queue: Queue, create: Create) -> None:
    """With another body it is refused; another tenant's is independent."""
    first = await create(api, "one", "key-1")
    assert first.status_code in (200, 201), first.text
    assert "idempotent-replayed" not in first.headers
    again = await create(api, "one", "key-1")
    assert (again.status_code, again.json()["id"]) == (first.status_code, first.json()["id"])
    assert again.headers["idempotent-replayed"] == "true"
    assert (await create(api, "two", "key-1")).json()["code"] == "idempotency_key_reused"
    other = await create(api, "one", "key-2")
    assert other.json()["id"] != first.json()["id"]
    api.headers.update(await bearer(fake_queue, "other"))
    second = await create(api, "one", "key-1")
    assert second.status_code in (200, 201)
    assert second.json()["id"] not in (first.json()["id"], other.json()["id"])


async def test_a_file_that_was_deleted_is_stored_again_at_once(
    api: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "UPLOAD_WAIT_S", 10**9)  # of a retry, for an upload in progress
    first = (await create_file(api, "one", "key-1")).json()["id"]
    assert (await api.delete(f"/v1/files/{first}")).status_code == 200
    async with asyncio.timeout(60):
        again = await create_file(api, "one", "key-1")
    assert (again.status_code, again.json()["id"]) == (200, first)
    assert (await api.get(f"/v1/files/{first}/content")).text == LINE


async def test_a_retry_does_not_wait_for_an_upload_that_failed(
    api: httpx.AsyncClient, fake_queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "UPLOAD_WAIT_S", 10**9)

    async def fails(*args: object) -> None:
        raise StorageUnavailable("the disk is full")

    with monkeypatch.context() as broken:
        broken.setattr(FolderStorage, "put", fails)
        assert (await create_file(api, "one", "key-1")).status_code == 503
    assert (await fake_queue.api_keys.footprint("acme")).stored_bytes == 0
    async with asyncio.timeout(60):
        assert (await create_file(api, "one", "key-1")).status_code == 200


async def test_a_repeated_call_of_hugging_face_waits_for_the_same_job(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path
) -> None:
    async def call(prompt: str) -> httpx.Response:
        body, headers = {"inputs": prompt}, {"Idempotency-Key": "key-1"}
        return await api.post("/compat/huggingface/demo", json=body, headers=headers)

    first, again = asyncio.create_task(call("a red circle")), asyncio.create_task(call("a red circle"))
    async with asyncio.timeout(30):
        while not (jobs := (await fake_queue.jobs.page("acme"))[0]):
            await asyncio.sleep(0.01)
    data = await finish(fake_queue, tmp_path, jobs[0].job.id)
    for response in (await first, await again):
        assert (response.content, response.headers["x-job-id"]) == (data, jobs[0].job.id)
    assert len((await fake_queue.jobs.page("acme"))[0]) == 1
    assert (await call("a blue square")).json()["code"] == "idempotency_key_reused"


async def create_video(api: httpx.AsyncClient, name: str, key: str) -> httpx.Response:
    return await api.post("/v1/videos", json={"prompt": name}, headers={"Idempotency-Key": key})


FILM = '[[model]]\nid = "film"\nsource = "x"\ntasks = ["text_to_video"]\nlimits = { max_frames = 81 }\n'


@pytest.mark.parametrize("create", [create_file, create_video])
async def test_a_repeated_request_counts_after_the_rotation_of_its_api_key(
    fake_queue: Queue, tmp_path: Path, create: Create
) -> None:
    (tmp_path / "models.toml").write_text(FILM)
    async with serving(fake_queue, tmp_path, auth="keys", models=tmp_path / "models.toml") as api:
        answers = []
        for _ in range(2):
            api.headers.update(await bearer(fake_queue, "acme"))
            answers.append(await create(api, "a", "key-1"))
    assert [answer.headers.get("idempotent-replayed") for answer in answers] == [None, "true"], answers[1].text
    assert answers[0].json()["id"] == answers[1].json()["id"]


async def test_a_replayed_endpoint_has_the_secret_of_the_first(api: httpx.AsyncClient) -> None:
    first, again = await create_webhook(api, "one", "key-1"), await create_webhook(api, "one", "key-1")
    assert first.json() == again.json()
    assert len((await api.get("/v1/webhooks")).json()["data"]) == 1
