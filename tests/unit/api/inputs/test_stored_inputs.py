"""Listing, reading and deleting input images, also as Replicate's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.http_server import BODY, bearer, png, serving
from harness.queue import end_retention

from shared.queue import Queue


async def upload(api: httpx.AsyncClient, width: int = 64, headers: dict[str, str] | None = None) -> str:
    files = {"file": ("a.png", png(width), "image/png")}
    return str((await api.post("/v1/inputs", files=files, headers=headers)).json()["id"])


async def ids(api: httpx.AsyncClient, **params: str | int) -> list[str]:
    """Return the ids of all pages, following the cursor."""
    found: list[str] = []
    while True:
        page = (await api.get("/v1/inputs", params=params)).json()
        found += [one["id"] for one in page["data"]]
        if not page["has_more"]:
            return found
        params["after"] = page["next_cursor"]


async def test_inputs_are_listed_in_pages(api: httpx.AsyncClient) -> None:
    uploaded = [await upload(api, 64 + number) for number in range(5)]
    assert await ids(api, limit=2) == await ids(api)
    assert sorted(await ids(api)) == sorted(uploaded)
    assert await ids(api, order="asc", limit=2) == (await ids(api))[::-1]
    assert await upload(api, 64) == uploaded[0]
    assert len(await ids(api)) == 5


async def test_an_input_can_be_read(api: httpx.AsyncClient) -> None:
    input_id = await upload(api, 80)
    stored = (await api.get(f"/v1/inputs/{input_id}")).json()
    assert (stored["id"], stored["width"], stored["content_type"]) == (input_id, 80, "image/png")
    assert stored["expires_at"].endswith("Z")
    content = await api.get(f"/v1/inputs/{input_id}/content", headers={"Range": "bytes=0-7"})
    assert (content.status_code, content.content) == (206, b"\x89PNG\r\n\x1a\n")
    assert (await api.get(f"/v1/inputs/{input_id}/content")).content == png(80)


async def test_a_deleted_input_is_gone_and_can_be_uploaded_again(api: httpx.AsyncClient, tmp_path: Path) -> None:
    input_id, kept = await upload(api, 64), await upload(api, 72)
    assert (await api.delete(f"/v1/inputs/{input_id}")).status_code == 204
    assert await ids(api) == [kept]
    assert len(list((tmp_path / "storage").rglob("*.png"))) == 1
    for path in (f"/v1/inputs/{input_id}", f"/v1/inputs/{input_id}/content"):
        assert (await api.get(path)).status_code == 404
    assert (await api.delete(f"/v1/inputs/{input_id}")).status_code == 404
    assert (await api.post("/v1/jobs", json={**BODY, "image": input_id})).status_code == 422
    assert await upload(api, 64) == input_id
    assert (await api.post("/v1/jobs", json={**BODY, "image": input_id})).status_code == 202


async def test_deleting_gives_its_space_back(api: httpx.AsyncClient, fake_queue: Queue) -> None:
    before = await fake_queue.api_keys.footprint("default")
    input_id = await upload(api)
    assert (await fake_queue.api_keys.footprint("default")).stored_objects == before.stored_objects + 1
    await api.delete(f"/v1/inputs/{input_id}")
    assert await fake_queue.api_keys.footprint("default") == before
    assert not await fake_queue.client.redis.exists(fake_queue.client.redis_keys.inputs("default"))


async def test_the_list_forgets_an_input_whose_retention_has_ended(api: httpx.AsyncClient, fake_queue: Queue) -> None:
    input_id, kept = await upload(api, 64), await upload(api, 72)
    await end_retention(fake_queue, input_id)
    assert await ids(api) == [kept]
    await end_retention(fake_queue, kept)
    assert not await fake_queue.client.redis.exists(fake_queue.client.redis_keys.inputs("default"))


async def test_an_input_of_an_unfinished_job_is_kept(api: httpx.AsyncClient) -> None:
    input_id = await upload(api)
    job_id = (await api.post("/v1/jobs", json={**BODY, "image": input_id})).json()["id"]
    assert (await api.get(f"/v1/inputs/{input_id}")).json()["expires_at"] is None
    refused = await api.delete(f"/v1/inputs/{input_id}")
    assert (refused.status_code, refused.json()["code"]) == (409, "conflict")
    await api.post(f"/v1/jobs/{job_id}/cancel")
    assert (await api.delete(f"/v1/inputs/{input_id}")).status_code == 204


@pytest.mark.parametrize("many", [False, True], ids=["alone", "in a bulk request"])
async def test_a_job_whose_input_is_deleted_while_it_is_submitted_is_refused(
    api: httpx.AsyncClient, fake_queue: Queue, monkeypatch: pytest.MonkeyPatch, many: bool
) -> None:
    """After the check of the request, before its job is queued."""
    input_id, submit = await upload(api), fake_queue.client.scripts.submit

    async def after_a_deletion(*args: Any, **options: Any) -> Any:
        assert (await api.delete(f"/v1/inputs/{input_id}")).status_code == 204
        return await submit(*args, **options)

    monkeypatch.setattr(fake_queue.client.scripts, "submit", after_a_deletion)
    body = {**BODY, "image": input_id}
    if many:
        lines, head = json.dumps(body).encode() + b"\n", {"Content-Type": "application/x-ndjson"}
        error = (await api.post("/v1/jobs:bulk", content=lines, headers=head)).json()["error"]
    else:
        refused = await api.post("/v1/jobs", json=body)
        assert refused.status_code == 422
        error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_input_image", "image")
    assert f"input {input_id} was deleted" in error["message"]
    assert (await api.get("/v1/jobs")).json()["data"] == []


async def test_an_input_of_another_tenant_is_not_found(fake_queue: Queue, tmp_path: Path) -> None:
    keys = {tenant: await bearer(fake_queue, tenant) for tenant in ("acme", "other")}
    async with serving(fake_queue, tmp_path, auth="keys") as api:
        input_id = await upload(api, headers=keys["acme"])
        for method, path in (
            ("GET", f"/v1/inputs/{input_id}"),
            ("GET", f"/v1/inputs/{input_id}/content"),
            ("DELETE", f"/v1/inputs/{input_id}"),
            ("GET", f"/compat/replicate/v1/files/{input_id}"),
            ("DELETE", f"/compat/replicate/v1/files/{input_id}"),
        ):
            assert (await api.request(method, path, headers=keys["other"])).status_code == 404
        assert (await api.get("/v1/inputs", headers=keys["other"])).json()["data"] == []
        assert (await api.get(f"/v1/inputs/{input_id}", headers=keys["acme"])).status_code == 200


async def test_the_url_of_a_file_of_replicate_answers(api: httpx.AsyncClient) -> None:
    files = {"content": ("a.png", png(80), "image/png")}
    created = (await api.post("/compat/replicate/v1/files", files=files)).json()
    found = (await api.get(created["urls"]["get"])).json()
    assert {name: found[name] for name in ("id", "content_type", "urls")} == {
        name: created[name] for name in ("id", "content_type", "urls")
    }
    assert set(found) == set(created)
    assert (await api.delete(f"/compat/replicate/v1/files/{created['id']}")).status_code == 204
    assert (await api.get(created["urls"]["get"])).status_code == 404
