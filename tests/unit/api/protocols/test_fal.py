"""Requests of fal's clients: the messages about their fields, and those that are sent again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.http_server import serving

from api.protocols.fal.queue_requests import parse_input
from shared.config.model_spec import ModelSpec
from shared.errors import InvalidRequest
from shared.queue import Queue

INPUT = {"prompt": "a red circle on a blue ground, left"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompt": None}, "prompt: Field required"),
        ({"stepz": 3}, "stepz: there is no such field"),
        ({"strength": 0.4}, "strength needs an image to start from"),
        ({"controls": [{"id": "edges"}]}, "controls.0.image: Field required"),
        ({"num_images": 0}, "num_images: Input should be greater than or equal to 1"),
        ({"frames": 9}, "frames: model 'one' does not support text_to_video; its tasks: text_to_image"),
    ],
)
def test_a_message_names_its_field_once(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        parse_input({**INPUT, **values}, ModelSpec(id="one", source="none"), {})
    assert error.value.message == message


async def test_an_idempotency_key_is_one_request(fake_queue: Queue, tmp_path: Path) -> None:
    """Its clients repeat a request with the same headers; for another model, priority or input the key is refused."""
    models = tmp_path / "models.toml"
    models.write_text("".join(f'[[model]]\nid = "{name}"\nsource = "none"\n' for name in ("one", "two")))
    async with serving(fake_queue, tmp_path, models=models) as api:

        async def submit(model: str = "one", priority: str = "normal", **values: object) -> httpx.Response:
            headers = {"Idempotency-Key": "k", "X-Fal-Queue-Priority": priority}
            return await api.post(f"/compat/fal/fusequeue/{model}", json={**INPUT, **values}, headers=headers)

        first, again = await submit(), await submit()
        assert [first.status_code, again.status_code] == [200, 200]
        assert first.json()["request_id"] == again.json()["request_id"]
        assert [one.headers.get("Idempotent-Replayed") for one in (first, again)] == [None, "true"]
        for other in (submit("two"), submit(priority="low"), submit(seed=1)):
            refused = await other
            assert (refused.status_code, refused.json()["error_type"]) == (422, "idempotency_key_reused")
        assert len((await api.get("/v1/jobs")).json()["data"]) == 1
