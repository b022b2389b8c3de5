"""`extra`: inputs of a model without a field of their own, as far as the models file allows them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.http_server import serving

from shared.config.model_spec import ModelSpec
from shared.model_inputs import ModelInput
from shared.queue import Queue
from shared.tasks import Task

MODELS = """
[[model]]
id = "demo"
source = "x"
extra = ["boxes", "sound"]

[[model]]
id = "always"
source = "x"
extra = ["boxes", "sound"]
defaults = { extra = { sound = "on" } }

[[model]]
id = "plain"
source = "x"
"""
BOXES = ModelInput(
    name="boxes",
    description="Where things are.",
    schema={"type": "array", "items": {"type": "object"}},
    tasks=(Task.TEXT_TO_IMAGE,),
)
INNER = ModelInput(name="steps_2", schema={"type": "integer"}, tasks=(Task.TEXT_TO_IMAGE,))


@pytest.fixture
async def api(fake_queue: Queue, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    (tmp_path / "models.toml").write_text(MODELS)
    async with serving(fake_queue, tmp_path, models=tmp_path / "models.toml") as client:
        yield client


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


async def post(api: httpx.AsyncClient, extra: Any, model: str = "demo") -> httpx.Response:
    return await api.post("/v1/jobs", json={"model": model, "prompt": "x", "extra": extra})


async def test_allowed_inputs_reach_the_job_and_its_response(api: httpx.AsyncClient, fake_queue: Queue) -> None:
    """Also before any worker has described them; then the worker checks them."""
    response = await post(api, {"boxes": [{"id": 1}], "sound": "yes"})
    assert (response.status_code, response.json()["extra"]) == (202, {"boxes": [{"id": 1}], "sound": "yes"})
    record = await fake_queue.jobs.get(response.json()["id"])
    assert record is not None
    assert record.job.extra == response.json()["extra"]


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (None, {"sound": "on"}),
        ({}, {"sound": "on"}),
        ({"boxes": []}, {"sound": "on", "boxes": []}),
        ({"sound": "off"}, {"sound": "off"}),
    ],
)
async def test_jobs_have_the_models_default_of_an_input_that_they_do_not_give(
    sent: dict[str, Any] | None, expected: dict[str, Any], api: httpx.AsyncClient
) -> None:
    """Also one like an earlier job."""
    for _ in range(2):
        response = await post(api, sent, "always")
        assert (response.status_code, response.json()["extra"]) == (202, expected)
    assert (await api.get("/v1/models/always")).json()["defaults"]["extra"] == {"sound": "on"}


async def test_an_input_of_many_levels_is_read_again(api: httpx.AsyncClient) -> None:
    response = await post(api, {"boxes": nested(14)})
    job = (await api.get(f"/v1/jobs/{response.json()['id']}")).json()
    assert job["extra"] == {"boxes": nested(14)}


async def test_a_number_that_json_cannot_write_is_refused(api: httpx.AsyncClient) -> None:
    body = b'{"model": "demo", "prompt": "x", "extra": {"boxes": [1e999]}}'
    response = await api.post("/v1/jobs", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 422
    assert response.json()["errors"][0]["param"] == "extra"


@pytest.mark.parametrize("source", ["elsewhere", "x"])
async def test_a_description_of_other_weights_does_not_count(
    source: str, api: httpx.AsyncClient, fake_queue: Queue
) -> None:
    """The worker that loads the present ones checks what they take."""
    await fake_queue.model_inputs.publish(ModelSpec(id="demo", source=source), [])
    status = (await post(api, {"boxes": [{}]})).status_code
    assert status == (422 if source == "x" else 202)


async def test_a_description_of_another_version_does_not_count(api: httpx.AsyncClient, fake_queue: Queue) -> None:
    client = fake_queue.client
    await client.redis.set(
        client.redis_keys.model_inputs("demo"), '{"weights": "x@", "inputs": [{"tasks": ["new"]}]}', ex=60
    )
    assert (await post(api, {"boxes": [{}]})).status_code == 202
    assert (await api.get("/v1/models/demo")).json()["extra"] is None


async def test_described_inputs_are_listed_and_checked(api: httpx.AsyncClient, fake_queue: Queue) -> None:
    """Those that the models file does not allow are not listed."""
    assert (await api.get("/v1/models/demo")).json()["extra"] is None
    await fake_queue.model_inputs.publish(ModelSpec(id="demo", source="x"), [BOXES, INNER])
    (listed,) = (await api.get("/v1/models/demo")).json()["extra"]
    assert listed == {
        "name": "boxes",
        "description": "Where things are.",
        "schema": {"type": "array", "items": {"type": "object"}},
        "default": None,
        "tasks": ["text_to_image"],
    }
    assert (await post(api, {"boxes": [{}]})).status_code == 202
    response = await post(api, {"boxes": [3], "sound": True})
    assert response.status_code == 422
    faults = {fault["param"]: fault["message"] for fault in response.json()["errors"]}
    assert faults == {
        "extra.boxes": "extra.boxes[0]: 3 is not of type 'object'",
        "extra.sound": "extra.sound: model 'demo' takes no such input for text_to_image",
    }


@pytest.mark.parametrize(
    ("extra", "model", "param", "message"),
    [
        ({"other": 1}, "demo", "extra.other", "model 'demo' does not allow it; its inputs are boxes, sound"),
        ({"boxes": []}, "plain", "extra.boxes", "model 'plain' does not allow it; it takes none"),
        ({"Boxes": []}, "demo", "extra.Boxes", "pattern"),
        ({"boxes": "x" * 40_000}, "demo", "extra", "at most 16 inputs and 32768 bytes of JSON"),
        ({f"a{at}": 1 for at in range(17)}, "demo", "extra", "at most 16 inputs"),
        ({"boxes": nested(15)}, "demo", "extra", "at most 16 levels"),
        ({"boxes": nested(254)}, "demo", "extra", "at most 16 levels"),
        ([1], "demo", "extra", "extra: it must be a JSON object"),
    ],
)
async def test_other_inputs_are_refused_by_name(
    extra: Any, model: str, param: str, message: str, api: httpx.AsyncClient
) -> None:
    response = await post(api, extra, model)
    assert response.status_code == 422
    (fault,) = response.json()["errors"]
    assert fault["param"] == param
    assert message in fault["message"]
