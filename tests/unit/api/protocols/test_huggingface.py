"""Bodies of `InferenceClient` as job requests."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import pytest
from harness.http_server import ROOT, png, serving

from api.jobs.request import JobRequest
from api.protocols.huggingface.routes import output_format, parse_inference_request
from shared.config import models_file
from shared.config.catalog import Catalog
from shared.errors import FusequeueError, InvalidRequest
from shared.job_fields import Priority
from shared.queue import Queue
from shared.tasks import OutputFormat, Task

CATALOG = models_file.load(ROOT / "models.toml")


def read(accept: str = "image/png", **parameters: Any) -> JobRequest:
    return parse_inference_request({"inputs": "a red circle", "parameters": parameters}, "demo", accept, CATALOG)


def test_hugging_face_parameters_become_job_fields() -> None:
    request = read(num_inference_steps=5, guidance_scale=3, width=128, height=64, negative_prompt="blue", seed=None)
    assert (request.model, request.prompt, request.negative_prompt) == ("demo", "a red circle", "blue")
    assert (request.steps, request.guidance_scale, request.width, request.height) == (5, 3.0, 128, 64)
    assert (request.seed, request.priority) == (None, Priority.INTERACTIVE)


def test_with_a_prompt_in_parameters_the_input_is_an_image() -> None:
    request = read(prompt="a blue square", target_size={"width": 64, "height": 128}, strength=0.5)
    assert (request.image, request.prompt) == ("data:;base64,a red circle", "a blue square")
    assert (request.width, request.height, request.strength) == (64, 128, 0.5)


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("image/png", OutputFormat.PNG),
        ("image/jpeg", OutputFormat.JPEG),
        ("text/html, image/WebP;q=0.8, image/png", OutputFormat.WEBP),
        ("*/*", OutputFormat.PNG),
        ("application/json", OutputFormat.PNG),
        ("video/mp4", OutputFormat.PNG),
        ("", OutputFormat.PNG),
    ],
)
def test_the_accept_header_selects_the_image_format(accept: str, kind: OutputFormat) -> None:
    assert output_format(accept) is kind
    assert read(accept).output_format is kind
    assert read(accept, output_format="webp").output_format is OutputFormat.WEBP  # the explicit field wins


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ([], None),
        ({"parameters": {}}, "inputs"),
        ({"inputs": ""}, "inputs"),
        ({"inputs": ["a", "b"]}, "inputs"),
        ({"inputs": "x", "more": 1}, "more"),
        ({"inputs": "x", "parameters": {"stepz": 1}}, "stepz"),
        ({"inputs": "x", "parameters": {"width": 60}}, "width"),
        ({"inputs": "x", "parameters": {"n": 2}}, "n"),
        ({"inputs": "x", "parameters": {"image": "in_a"}}, "parameters.image"),
        ({"inputs": "x", "parameters": {"model": "other"}}, "parameters.model"),
        ({"inputs": "x", "parameters": {"loras": [{"scale": 1}]}}, "loras.0.path"),
        ({"inputs": "x", "parameters": {"loras": [{"path": "ink"}], "adapters": []}}, "loras"),
        ({"inputs": "iVBORw0KGgoAAAANSUhEUg==", "parameters": {"strength": 0.5}}, "parameters.prompt"),
        ({"inputs": "x", "parameters": {"prompt": "y", "target_size": {"width": 64}}}, "height"),
    ],
)
def test_an_error_names_the_invalid_field(body: Any, param: str | None) -> None:
    with pytest.raises(FusequeueError) as error:
        parse_inference_request(body, "demo", "", CATALOG)
    assert error.value.param == param


@pytest.mark.parametrize("parameters", [{}, {"num_frames": 16}, {"output_format": "mp4"}, {"seed": 7}])
def test_a_video_model_is_refused_with_where_to_go(parameters: dict[str, Any]) -> None:
    spec = CATALOG.get("demo").model_copy(update={"id": "films", "tasks": (Task.TEXT_TO_VIDEO, Task.IMAGE_TO_VIDEO)})
    with pytest.raises(InvalidRequest, match="makes videos; use /v1/videos or /v1/jobs"):
        parse_inference_request({"inputs": "a wave", "parameters": parameters}, "films", "", Catalog((spec,)))


async def test_an_image_without_a_prompt_is_refused_with_what_is_missing(fake_queue: Queue, tmp_path: Path) -> None:
    """The client sends an image by itself as the body, and one with parameters as base64."""
    async with serving(fake_queue, tmp_path) as api:
        url, encoded = "/compat/huggingface/demo", base64.b64encode(png()).decode()
        bare = await api.post(url, content=png(), headers={"Content-Type": "image/png"})
        with_parameters = await api.post(url, json={"inputs": encoded, "parameters": {"strength": 0.5}})
    for response in (bare, with_parameters):
        assert response.status_code == 422
        assert response.json()["error"].startswith("parameters.prompt: missing; an image in `inputs` needs a prompt")


@pytest.mark.parametrize("prefix", ["", "data:image/png;base64,", "data:;base64,"])
def test_an_image_with_a_prompt_is_base64_or_a_data_url(prefix: str) -> None:
    encoded = base64.b64encode(png()).decode()
    body = {"inputs": prefix + encoded, "parameters": {"prompt": "a red circle"}}
    request = parse_inference_request(body, "demo", "", CATALOG)
    assert request.image == (prefix or "data:;base64,") + encoded


async def test_the_error_field_is_text_for_every_error(fake_queue: Queue, tmp_path: Path) -> None:
    """Also for invalid keys and large bodies, which are refused before the handler; the other fields remain."""
    async with serving(fake_queue, tmp_path, max_body_bytes=1_000) as api:
        large = await api.post("/compat/replicate/v1/predictions/a/cancel", json={"prompt": 1_000 * "a"})
        unknown = await api.get("/compat/huggingface/none/such")
    assert (large.status_code, unknown.status_code) == (413, 405)
    for refused in (large.json(), unknown.json()):
        assert refused["error"] == refused["detail"]
    async with serving(fake_queue, tmp_path, auth="keys") as api:
        response = await api.post("/compat/huggingface/demo", json={}, headers={"Authorization": "Bearer hf_x"})
    body = response.json()
    assert (response.status_code, body["code"]) == (401, "invalid_api_key")
    assert body["error"] == body["detail"] == "not a key of fusequeue: keys begin with fq_"
    assert response.headers["www-authenticate"].startswith("Bearer ")


async def test_a_call_names_the_deadline_of_a_job_that_expires_in_the_queue(fake_queue: Queue, tmp_path: Path) -> None:
    """It is no fault of the service."""
    async with serving(fake_queue, tmp_path) as api:
        body = {"model": "demo", "prompt": "a red circle", "deadline_s": 0.001}
        call = asyncio.create_task(api.post("/v1/images/generations", json=body))
        async with asyncio.timeout(30):
            while not await fake_queue.maintenance.expire(10):
                await asyncio.sleep(0.01)
        response = await call
    assert (response.status_code, response.json()["code"]) == (504, "deadline_exceeded")
    assert response.headers["x-should-retry"] == "false"
