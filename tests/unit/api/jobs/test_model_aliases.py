"""Requests name a model by an alias; all else has its id."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.http_server import ROOT, serving, working

from shared.queue import Queue

ALIAS, OWNED = "gpt-image-1", "stability-ai/sdxl"


@pytest.fixture
async def api(fake_queue: Queue, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    text = (ROOT / "models.toml").read_text("utf-8").replace('"demo/model"', f'"{ROOT / "demo/model"}"')
    models = tmp_path / "models.toml"
    models.write_text(text.replace('id = "demo"', f'id = "demo"\naliases = ["{ALIAS}", "{OWNED}"]', 1), "utf-8")
    async with serving(fake_queue, tmp_path, models=models) as client:
        yield client


@pytest.mark.parametrize("model", [ALIAS, OWNED, "demo"])
async def test_a_job_of_an_alias_is_one_of_the_model(api: httpx.AsyncClient, model: str) -> None:
    """The second request takes the way of one like an earlier one."""
    for _ in range(2):
        response = await api.post("/v1/jobs", json={"model": model, "prompt": "a dog"})
        assert response.status_code == 202, response.text
        assert response.json()["model"] == "demo"
    (queue,) = (await api.get("/v1/queues")).json()["data"]
    assert (queue["model"], sum(queue["jobs"].values())) == ("demo", 2)
    replayed = [
        await api.post("/v1/jobs", json={"model": model, "prompt": "a cat"}, headers={"Idempotency-Key": "k"})
        for _ in range(2)
    ]
    assert [one.json()["model"] for one in replayed] == ["demo", "demo"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/jobs:bulk", {"model": ALIAS, "prompt": "a dog"}),
        ("/compat/replicate/v1/models/stability-ai/sdxl/predictions", {"input": {"prompt": "a dog"}}),
        ("/compat/fal/stability-ai/sdxl", {"prompt": "a dog"}),
        (f"/compat/huggingface/{ALIAS}", {"inputs": "a dog"}),
        ("/v1/images/generations", {"model": ALIAS, "prompt": "a dog"}),
    ],
)
async def test_other_routes_know_aliases(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    headers = {"Content-Type": "application/x-ndjson" if path.endswith(":bulk") else "application/json"}
    async with working(fake_queue, tmp_path):
        response = await api.post(path, content=json.dumps(body), headers=headers)
    assert response.status_code < 300, response.text
    (job,) = (await api.get("/v1/jobs")).json()["data"]
    assert job["model"] == "demo"


async def test_a_model_lists_its_aliases(api: httpx.AsyncClient) -> None:
    listed = (await api.get("/v1/models")).json()["data"]
    assert [(one["id"], one["aliases"]) for one in listed] == [("demo", [ALIAS, OWNED])]
    assert (await api.get(f"/v1/models/{ALIAS}")).json()["id"] == "demo"
    assert (await api.get(f"/v1/models/{OWNED}")).json()["id"] == "demo"


async def test_an_unknown_model_is_answered_with_the_ids(api: httpx.AsyncClient) -> None:
    response = await api.post("/v1/jobs", json={"model": "gpt-image-2", "prompt": "a dog"})
    assert response.status_code == 404
    assert "available: demo" in response.text


async def test_operators_end_by_an_alias_what_they_began_by_it(api: httpx.AsyncClient) -> None:
    assert (await api.put(f"/v1/pauses/models/{ALIAS}")).json()["name"] == "demo"
    assert (await api.delete(f"/v1/pauses/models/{OWNED}")).status_code == 204
    assert (await api.get("/v1/pauses")).json()["data"] == []
    assert (await api.post(f"/v1/models/{ALIAS}:pin")).status_code == 202
    assert (await api.post(f"/v1/models/{OWNED}:unpin")).json()["model"] == "demo"


async def test_filters_know_aliases(api: httpx.AsyncClient) -> None:
    job = (await api.post("/v1/jobs", json={"model": ALIAS, "prompt": "a dog"})).json()["id"]
    for model in (ALIAS, "demo"):
        assert [one["id"] for one in (await api.get("/v1/jobs", params={"model": model})).json()["data"]] == [job]
    assert (await api.get("/v1/jobs", params={"model": "another"})).json()["data"] == []
    canceled = (await api.post("/v1/jobs:cancel", params={"model": OWNED})).json()
    assert canceled["ids"] == [job]
