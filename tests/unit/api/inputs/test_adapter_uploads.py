"""Adapters over HTTP: uploaded, listed, used by jobs of their tenant, and deleted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.http_server import BODY, ROOT, bearer, claimed, serving
from harness.tables import row
from tiny.safetensors_file import demo_lora, file_of

from shared.config.model_spec import ModelSpec
from shared.errors import StorageUnavailable
from shared.queue import Queue
from shared.runtime.clock import new_id
from shared.storage.folder import FolderStorage

COMPILED = '\n[[model]]\nid = "compiled"\nsource = "demo/model"\ncompile = true\ntasks = ["text_to_image"]\n'


@pytest.fixture
async def api(fake_queue: Queue, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    models = tmp_path / "models.toml"
    models.write_text((ROOT / "models.toml").read_text().replace('"demo/model"', f'"{ROOT}/demo/model"') + COMPILED)
    async with serving(fake_queue, tmp_path, models=models, max_adapter_bytes=50_000) as client:
        yield client


async def upload(api: httpx.AsyncClient, seed: int = 1, **options: Any) -> httpx.Response:
    data, headers = {"model": "demo", **options.pop("data", {})}, options.pop("headers", {})
    files = {"file": ("ink.safetensors", options.pop("content", demo_lora(seed)))}
    return await api.post("/v1/adapters", files=files, data=data, headers=headers)


def stored(folder: Path) -> list[Path]:
    return [path for path in (folder / "storage" / "adapters").rglob("*") if path.is_file()]


async def test_an_uploaded_adapter_is_used_by_jobs_until_it_is_deleted(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path
) -> None:
    """It is kept while a job that has not ended uses it."""
    created = await upload(api, data={"name": "ink", "scale": "0.5", "max_scale": "1.5"})
    assert created.status_code == 201, created.text
    adapter = created.json()
    assert adapter["id"].startswith("adapter_")
    assert (adapter["name"], adapter["model"], adapter["scale"]) == ("ink", "demo", 0.5)
    assert (await api.get(f"/v1/adapters/{adapter['id']}")).json() == adapter
    assert (await api.get("/v1/adapters")).json()["data"] == [adapter]
    accepted = await api.post("/v1/jobs", json={**BODY, "adapters": [{"id": adapter["id"]}]})
    assert accepted.json()["adapters"] == [{"id": adapter["id"], "scale": 0.5}]
    refused = await api.delete(f"/v1/adapters/{adapter['id']}")
    assert (refused.status_code, refused.json()["code"]) == (409, "conflict")
    assert (await claimed(fake_queue, accepted.json()["id"])).job.adapters[0].id == adapter["id"]
    await api.post(f"/v1/jobs/{accepted.json()['id']}/cancel")
    other = await api.post("/v1/jobs", json={**BODY, "adapters": [{"id": adapter["id"], "scale": 1.6}]})
    assert other.json()["error"]["param"] == "adapters.0.scale"


async def test_a_retry_of_a_job_whose_adapter_was_deleted_is_refused(api: httpx.AsyncClient, tmp_path: Path) -> None:
    adapter_id = (await upload(api)).json()["id"]
    job = (await api.post("/v1/jobs", json={**BODY, "adapters": [{"id": adapter_id}]})).json()
    await api.post(f"/v1/jobs/{job['id']}/cancel")
    assert stored(tmp_path)
    assert (await api.delete(f"/v1/adapters/{adapter_id}")).status_code == 204
    assert (await api.get(f"/v1/adapters/{adapter_id}")).status_code == 404
    assert not stored(tmp_path)
    for again in (
        await api.post(f"/v1/jobs/{job['id']}/retry"),
        await api.post("/v1/jobs", json={**BODY, "adapters": [{"id": adapter_id}]}),
    ):
        assert again.status_code == 422, again.text
        assert again.json()["error"]["param"] == "adapters.0.id"
        assert "or it has been deleted" in again.json()["error"]["message"]


async def test_an_ended_job_is_retried_with_its_adapter(api: httpx.AsyncClient) -> None:
    adapter_id = (await upload(api)).json()["id"]
    body = {**BODY, "adapters": [{"id": adapter_id, "scale": 0.25}]}
    job = (await api.post("/v1/jobs", json=body)).json()
    await api.post(f"/v1/jobs/{job['id']}/cancel")
    again = await api.post(f"/v1/jobs/{job['id']}/retry")
    assert again.json()["adapters"] == [{"id": adapter_id, "scale": 0.25}]
    assert (await api.delete(f"/v1/adapters/{adapter_id}")).status_code == 409


async def test_an_adapter_of_another_tenant_does_not_exist(api: httpx.AsyncClient, fake_queue: Queue) -> None:
    """Its id is answered like one that was never given out."""
    owner, other = await bearer(fake_queue, "acme"), await bearer(fake_queue, "other")
    adapter_id, unknown = (await upload(api, headers=owner)).json()["id"], new_id("adapter")
    assert (await api.get("/v1/adapters", headers=other)).json()["data"] == []
    for method, path in (("GET", "/v1/adapters/{}"), ("DELETE", "/v1/adapters/{}")):
        known, missing = [await api.request(method, path.format(one), headers=other) for one in (adapter_id, unknown)]
        assert known.status_code == missing.status_code == 404
        assert known.json()["detail"] == missing.json()["detail"].replace(unknown, adapter_id)
    known, missing = [
        await api.post("/v1/jobs", json={**BODY, "adapters": [{"id": one}]}, headers=other)
        for one in (adapter_id, unknown)
    ]
    assert known.status_code == missing.status_code == 422
    assert known.json()["detail"] == missing.json()["detail"].replace(unknown, adapter_id)
    assert (await api.get(f"/v1/adapters/{adapter_id}", headers=owner)).status_code == 200


EMBEDDING = file_of({"emb_params": ([1, 2], [1, 2])})
INVALID_UPLOADS = [
    ({"data": {"token": "word"}}, 422, "token"),
    ({"content": EMBEDDING, "data": {"token": "(word)"}}, 422, "token"),
    ({"content": EMBEDDING, "data": {"scale": "0.5"}}, 422, "scale"),
    ({"content": EMBEDDING, "data": {"component": "unet"}}, 422, "component"),
    ({"content": b"PK\x03\x04 a pickle of torch"}, 422, "file"),
    ({"content": b"not a safetensors file"}, 422, "file"),
    ({"content": b""}, 422, "file"),
    ({"content": file_of({"unet.conv_in.weight": ([1], [1])})}, 422, "file"),
    ({"content": bytes(51_000)}, 413, "file"),
    ({"data": {"model": "none"}}, 404, None),
    ({"data": {"model": "compiled"}}, 422, "model"),
    ({"data": {"scale": "3"}}, 422, "scale"),
    ({"data": {"scale": "nan"}}, 422, "scale"),
    ({"data": {"max_scale": "11"}}, 422, "max_scale"),
    ({"data": {"component": "../x"}}, 422, "component"),
    ({"data": {"more": "1"}}, 422, "more"),
    ({"data": {"name": "x" * 129}}, 422, "name"),
]


async def test_an_invalid_upload_is_refused(api: httpx.AsyncClient, tmp_path: Path) -> None:
    for options, status, param in INVALID_UPLOADS:
        with row(param):
            refused = await upload(api, **options)
            assert refused.status_code == status, refused.text
            if param is not None:
                assert refused.json()["error"]["param"] == param
            assert not stored(tmp_path)
            assert (await api.get("/v1/adapters")).json()["data"] == []


async def test_an_adapter_is_for_jobs_of_its_model(fake_queue: Queue, tmp_path: Path) -> None:
    models = tmp_path / "models.toml"
    text = (ROOT / "models.toml").read_text().replace('"demo/model"', f'"{ROOT}/demo/model"')
    models.write_text(text + COMPILED.replace("compiled", "second").replace("compile = true", ""))
    async with serving(fake_queue, tmp_path, models=models) as api:
        adapter_id = (await upload(api)).json()["id"]
        body = {**BODY, "model": "second", "adapters": [{"id": adapter_id}]}
        assert (await api.post("/v1/jobs", json=body)).json()["error"]["param"] == "adapters.0.id"


async def test_an_upload_is_checked_against_the_layers_that_a_worker_has_published(
    api: httpx.AsyncClient, fake_queue: Queue
) -> None:
    """Those of other weights of the same name do not count."""
    demo = ModelSpec(id="demo", source="somewhere/model")
    await fake_queue.adapters.publish_layers(demo.model_copy(update={"source": "other"}), {"unet.conv_in": (4, 32)})
    assert (await upload(api)).status_code == 201
    await fake_queue.adapters.publish_layers(demo, {"unet.conv_in": (4, 32)})
    refused = await upload(api)
    assert (refused.status_code, refused.json()["code"]) == (422, "invalid_adapter")
    assert "which the model does not have" in refused.json()["detail"]


def an_embedding(name: str = "emb_params", width: int = 64) -> bytes:
    return file_of({name: ([2, width], [0.5] * 2 * width)})


@pytest.mark.parametrize(
    ("key", "data", "token"),
    [("emb_params", {}, "ink"), ("<cat>", {}, "<cat>"), ("<cat>", {"token": "EasyNeg"}, "EasyNeg")],
)
async def test_an_embedding_has_a_word_and_no_scale(
    key: str, data: dict[str, str], token: str, api: httpx.AsyncClient
) -> None:
    """The word is that of the upload, of the file, or the file's name."""
    made = (await upload(api, content=an_embedding(key), data=data)).json()
    assert (made["kind"], made["token"], made["warnings"]) == ("embedding", token, [])
    body = {**BODY, "adapters": [{"id": made["id"]}]}
    assert (await api.post("/v1/jobs", json=body)).json()["adapters"] == [{"id": made["id"], "scale": 1.0}]
    body["adapters"][0]["scale"] = 0.5
    assert (await api.post("/v1/jobs", json=body)).json()["error"]["param"] == "adapters.0.scale"
    other = (await upload(api, content=an_embedding(), data={"token": token.upper()})).json()
    body["adapters"] = [{"id": made["id"]}, {"id": other["id"]}]
    assert "of the same word" in (await api.post("/v1/jobs", json=body)).json()["error"]["message"]


async def test_an_embedding_of_another_width_is_refused(api: httpx.AsyncClient, fake_queue: Queue) -> None:
    demo = ModelSpec(id="demo", source="somewhere/model")
    await fake_queue.adapters.publish_layers(
        demo, {"unet.x": (4, 32), "embeddings.": (0, 0), "embeddings.text_encoder": (591, 64)}
    )
    assert (await upload(api, content=an_embedding())).status_code == 201
    refused = await upload(api, content=an_embedding(width=768))
    assert (refused.status_code, refused.json()["code"]) == (422, "invalid_adapter")
    assert "768 values a vector, and text_encoder of the model takes 64" in refused.json()["detail"]


async def test_a_repeated_upload_makes_one_adapter(api: httpx.AsyncClient) -> None:
    headers = {"Idempotency-Key": "once"}
    first, second = await upload(api, headers=headers), await upload(api, headers=headers)
    assert first.json() == second.json()
    assert second.headers["Idempotent-Replayed"] == "true"
    other = await upload(api, seed=2, headers=headers)
    assert other.json()["code"] == "idempotency_key_reused"
    assert len((await api.get("/v1/adapters")).json()["data"]) == 1


async def test_a_list_has_pages(api: httpx.AsyncClient) -> None:
    """Newest first."""
    ids = [(await upload(api, seed)).json()["id"] for seed in range(2)]
    page = (await api.get("/v1/adapters?limit=1")).json()
    assert ([one["id"] for one in page["data"]], page["has_more"]) == ([ids[1]], True)
    rest = (await api.get(f"/v1/adapters?limit=1&after={page['next_cursor']}")).json()
    assert ([one["id"] for one in rest["data"]], rest["has_more"]) == ([ids[0]], False)


async def test_an_upload_that_fails_does_not_delete_the_adapter_of_its_retry(
    api: httpx.AsyncClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client retries after its own time limit, while the first request still waits for the storage."""
    begun, fail = asyncio.Event(), asyncio.Event()

    async def slow(*_args: object) -> None:
        begun.set()
        await fail.wait()
        raise StorageUnavailable("the disk is full")

    headers = {"Idempotency-Key": "once"}
    with monkeypatch.context() as broken:
        broken.setattr(FolderStorage, "put", slow)
        first = asyncio.create_task(upload(api, headers=headers))
        await begun.wait()
    retry = await upload(api, headers=headers)
    fail.set()
    assert ((await first).status_code, retry.status_code) == (503, 201)
    assert (await api.get(f"/v1/adapters/{retry.json()['id']}")).json() == retry.json()
    assert stored(tmp_path)
