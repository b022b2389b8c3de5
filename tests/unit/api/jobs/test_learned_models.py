"""What the API knows of a model on the hub once a worker has loaded it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.http_server import png, serving

from api import learned_models
from shared.config.model_facts import ModelFacts
from shared.config.model_spec import ModelSpec
from shared.queue import Queue

MODELS = """
[[model]]
id = "demo"
aliases = ["other"]
source = "org/flux"
tasks = ["text_to_image", "image_to_image"]
schedulers = ["LMSDiscreteScheduler", "DDIM"]
defaults = { width = 72, height = 64, strength = 0.5 }
"""
SPEC = ModelSpec(id="demo", source="org/flux")


@pytest.fixture
async def api(fake_queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[httpx.AsyncClient]:
    monkeypatch.setattr(learned_models, "EVERY_S", 0.0)
    (tmp_path / "models.toml").write_text(MODELS)
    async with serving(fake_queue, tmp_path, models=tmp_path / "models.toml") as client:
        yield client


async def post(api: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await api.post("/v1/jobs", json={"model": "demo", "prompt": "x", **fields})


async def test_sides_that_a_worker_would_round_are_refused_once_it_has_loaded_the_model(
    api: httpx.AsyncClient, fake_queue: Queue
) -> None:
    """By every name of the model, and for a request like an earlier one."""
    assert (await post(api, width=72, height=64)).status_code == 202
    await fake_queue.model_facts.publish(SPEC, ModelFacts(size_step=16))
    for model in ("demo", "other"):
        response = await post(api, width=72, height=64, model=model)
        assert response.status_code == 422
        (error,) = response.json()["errors"]
        assert (error["param"], error["message"]) == ("width", "width must be a multiple of 16, not 72")
    assert (await post(api, width=80, height=64)).status_code == 202


async def test_sides_that_a_request_does_not_send_are_those_that_are_made(
    api: httpx.AsyncClient, fake_queue: Queue
) -> None:
    """Defaults, and those of the image to start from."""
    await fake_queue.model_facts.publish(SPEC, ModelFacts(size_step=16))
    job = (await post(api)).json()
    assert (job["width"], job["height"]) == (64, 64)
    files = {"file": ("a.png", png(100, 72), "image/png")}
    image = (await api.post("/v1/inputs", files=files)).json()["id"]
    job = (await post(api, image=image)).json()
    assert (job["width"], job["height"]) == (96, 64)


async def test_models_list_the_learned_step(api: httpx.AsyncClient, fake_queue: Queue) -> None:
    assert (await api.get("/v1/models/demo")).json()["limits"]["multiple_of"] == 8
    await fake_queue.model_facts.publish(SPEC, ModelFacts(size_step=16))
    assert (await api.get("/v1/models/demo")).json()["limits"]["multiple_of"] == 16
    (listed,) = (await api.get("/v1/models")).json()["data"]
    assert (listed["limits"]["multiple_of"], listed["defaults"]["width"]) == (16, 64)


async def test_a_reload_with_other_files_replaces_what_was_learned(api: httpx.AsyncClient, fake_queue: Queue) -> None:
    for step, multiple_of in ((16, 16), (1, 8)):
        await fake_queue.model_facts.publish(SPEC, ModelFacts(size_step=step))
        assert (await api.get("/v1/models/demo")).json()["limits"]["multiple_of"] == multiple_of


@pytest.mark.parametrize("wire", ["{", '{"weights": "flux@", "facts": {"size_step": 0}}'])
async def test_facts_of_other_weights_and_versions_do_not_count(
    wire: str, api: httpx.AsyncClient, fake_queue: Queue
) -> None:
    await fake_queue.model_facts.publish(ModelSpec(id="demo", source="org/else"), ModelFacts(size_step=16))
    assert (await post(api, width=72, height=64)).status_code == 202
    client = fake_queue.client
    await client.redis.set(client.redis_keys.model_facts("demo"), wire, ex=60)
    assert (await post(api, width=72, height=64)).status_code == 202


async def test_schedulers_that_the_worker_cannot_make_are_not_listed_and_refused(
    api: httpx.AsyncClient, fake_queue: Queue
) -> None:
    """A package is missing there; before its worker is known a job with one is accepted, and fails."""
    assert (await api.get("/v1/models/demo")).json()["schedulers"] == ["LMSDiscreteScheduler", "DDIM"]
    assert (await post(api, scheduler="lms", width=64)).status_code == 202
    reason = "LMSDiscreteScheduler needs the package scipy"
    await fake_queue.model_facts.publish(SPEC, ModelFacts(unusable_schedulers={"LMSDiscreteScheduler": reason}))
    (listed,) = (await api.get("/v1/models")).json()["data"]
    assert listed["schedulers"] == (await api.get("/v1/models/demo")).json()["schedulers"] == ["DDIM"]
    response = await post(api, scheduler="lms", width=64)
    assert response.status_code == 422
    (error,) = response.json()["errors"]
    assert (error["param"], error["message"]) == ("scheduler", f"scheduler: {reason}; it must be one of: DDIM")
