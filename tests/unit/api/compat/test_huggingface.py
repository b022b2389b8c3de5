"""Bodies of `InferenceClient` as job requests."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from harness.http_server import ROOT, serving

from api.compat.huggingface import output_format, parse_inference_request
from shared.config import models_file
from shared.errors import FusequeueError
from shared.job import OutputFormat, Priority
from shared.queue import Queue
from shared.request import JobRequest

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
        ({"inputs": "x", "parameters": {"prompt": "y", "target_size": {"width": 64}}}, "height"),
    ],
)
def test_an_error_names_the_invalid_field(body: Any, param: str | None) -> None:
    with pytest.raises(FusequeueError) as error:
        parse_inference_request(body, "demo", "", CATALOG)
    assert error.value.param == param


async def test_the_error_field_is_text_for_every_error(fake_queue: Queue, tmp_path: Path) -> None:
    """Also for invalid keys, which are rejected before the handler; the machine-readable fields remain."""
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
