"""Inpainting, editing, video and control images over HTTP: requests, responses and errors."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.http_server import png, serving
from harness.tables import row

from shared.queue import Queue

MODELS = """
[[model]]
id = "painter"
source = "x"
tasks = ["text_to_image", "image_to_image", "inpaint"]

[model.limits]
max_controls = 2
[[model.adapter]]
id = "ink"
source = "org/ink"
weight_name = "ink.safetensors"
scale = 0.8
[[model.control]]
id = "edges"
source = "x"
[[model.control]]
id = "depth"
source = "y"
scale = 0.6
max_scale = 0.8
[[model.control]]
id = "style"
source = "z"
kind = "ip_adapter"
weight_name = "a.safetensors"
[[model.control]]
id = "like"
source = "r"
kind = "redux"

[[model]]
id = "editor"
source = "x"
tasks = ["edit"]
[model.limits]
max_input_images = 3
[model.references]
pixels = 65536

[[model]]
id = "outliner"
source = "x"
tasks = ["edit", "image_to_image"]
[[model.control]]
id = "outline"
kind = "structure"

[[model]]
id = "enlarger"
source = "x"
tasks = ["upscale"]

[[model]]
id = "film"
source = "x"
tasks = ["text_to_video", "image_to_video"]
[model.defaults]
frames = 17
fps = 16
[model.limits]
max_frames = 81
frames_multiple = 4
last_image = "allowed"
"""
UNKNOWN = "in_0123456789abcdef0123456789abcdef"


@pytest.fixture
async def api(fake_queue: Queue, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    models = tmp_path / "models.toml"
    models.write_text(MODELS)
    async with serving(fake_queue, tmp_path, models=models) as client:
        yield client


def data_url(width: int, height: int, colour: str) -> str:
    return f"data:image/png;base64,{base64.b64encode(png(width, height, colour)).decode()}"


async def submitted(api: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    answer = await api.post("/v1/jobs", json={"prompt": "x", **body})
    assert answer.status_code == 202, answer.text
    return dict(answer.json())


async def test_several_images_are_edited_into_one(api: httpx.AsyncClient, fake_queue: Queue) -> None:
    """In the order sent, whatever their form, and with the proportions of the first."""
    uploaded = (await api.post("/v1/inputs", files={"file": ("a.png", png(400, 200))})).json()["id"]
    job = await submitted(api, model="editor", images=[uploaded, data_url(512, 512, "blue")])
    assert job["task"] == "edit"
    assert [(image["width"], image["height"]) for image in job["images"]] == [(400, 200), (512, 512)]
    assert job["image"] == job["images"][0]
    assert job["image"]["id"] == uploaded
    assert (job["width"], job["height"], job["strength"]) == (728, 360, None)
    record = await fake_queue.jobs.get(job["id"])
    assert record is not None
    assert record.job.reference_sizes == ((352, 192), (256, 256))


async def test_an_inpainting_job_has_an_image_and_a_mask(api: httpx.AsyncClient) -> None:
    """The response contains both."""
    job = await submitted(api, model="painter", image=data_url(64, 32, "red"), mask=data_url(128, 64, "white"))
    assert (job["task"], job["strength"], job["mask"]["width"], job["last_image"]) == ("inpaint", 1.0, 128, None)


async def test_an_image_of_structure_keeps_no_jobs_apart(api: httpx.AsyncClient, fake_queue: Queue) -> None:
    """All jobs of the model have one, unlike those of control nets."""
    job = await submitted(api, **follows("outline"))
    record = await fake_queue.jobs.get(job["id"])
    assert record is not None
    assert (record.job.controls[0].kind, record.job.control_ids) == ("structure", ())


@pytest.mark.parametrize("prompt", [{}, {"prompt": ""}])
async def test_an_image_of_redux_needs_no_prompt(api: httpx.AsyncClient, prompt: dict[str, str]) -> None:
    """It can be left out or empty."""
    made = await api.post("/v1/jobs", json=controls("like") | prompt)
    assert (made.status_code, made.json()["prompt"]) == (202, "")
    assert [control["kind"] for control in made.json()["controls"]] == ["redux"]
    refused = await api.post("/v1/jobs", json=controls("edges") | prompt)
    assert (refused.status_code, refused.json()["errors"][0]["param"]) == (422, "prompt")


@pytest.mark.parametrize(("sent", "size"), [({}, (512, 384)), ({"width": 256, "height": 256}, (256, 256))])
async def test_an_upscaled_image_has_four_times_its_sides(
    api: httpx.AsyncClient, sent: dict[str, int], size: tuple[int, int]
) -> None:
    """Or the size that the request names; it needs no prompt."""
    made = await api.post("/v1/jobs", json={"model": "enlarger", "image": data_url(128, 96, "red"), **sent})
    assert made.status_code == 202, made.text
    job = made.json()
    assert (job["task"], (job["width"], job["height"]), job["prompt"]) == ("upscale", size, "")


@pytest.mark.parametrize(
    ("sent", "param", "said"),
    [
        ({"image": data_url(520, 64, "red")}, "image", "520x64 becomes 2080x256"),
        ({"image": data_url(64, 64, "red"), "strength": 0.5}, "strength", "does not support image_to_image"),
        ({}, "image", "needs one"),
    ],
)
async def test_an_image_that_cannot_be_upscaled_is_refused(
    api: httpx.AsyncClient, sent: dict[str, Any], param: str, said: str
) -> None:
    """It would be too large, or has fields of other tasks, or is missing."""
    refused = await api.post("/v1/jobs", json={"model": "enlarger", **sent})
    fault = refused.json()["errors"][0]
    assert (refused.status_code, fault["param"]) == (422, param)
    assert said in fault["message"]


async def test_a_video_has_a_first_and_a_last_image(api: httpx.AsyncClient) -> None:
    """With the requested length and rate, or the model's defaults."""
    first, last = data_url(64, 64, "red"), data_url(64, 64, "blue")
    job = await submitted(api, model="film", image=first, last_image=last, frames=33)
    assert (job["task"], job["frames"], job["fps"], job["output_format"]) == ("image_to_video", 33, 16, "mp4")
    assert job["last_image"]["id"] != job["image"]["id"]


async def test_a_job_has_control_images(api: httpx.AsyncClient, fake_queue: Queue) -> None:
    """Their ids and settings are in the response, and they are inputs that the job keeps."""
    depth = (await api.post("/v1/inputs", files={"file": ("a.png", png())})).json()["id"]
    edges = data_url(64, 64, "blue")
    chosen = [{"id": "edges", "image": edges, "scale": 0.5, "end": 0.7}, {"id": "depth", "image": depth}]
    job = await submitted(api, model="painter", controls=chosen)
    shown = [{**control, "image": control["image"]["id"]} for control in job["controls"]]
    assert shown[1] == {"id": "depth", "kind": "controlnet", "image": depth, "scale": 0.6, "start": 0.0, "end": 1.0}
    assert (shown[0]["scale"], shown[0]["start"], shown[0]["end"]) == (0.5, 0.0, 0.7)
    record = await fake_queue.jobs.get(job["id"])
    assert record is not None
    assert list(record.job.inputs) == ["controls.0.image", "controls.1.image"]
    assert record.job.inputs["controls.1.image"].id == depth
    assert (await submitted(api, model="painter"))["controls"] == []


def follows(name: str, **fields: Any) -> dict[str, Any]:
    """Return a request that changes an image by another one of structure; `fields` are those of the control."""
    chosen = {"id": name, "image": data_url(8, 8, "red"), **fields}
    return {"model": "outliner", "task": "image_to_image", "image": data_url(8, 8, "red"), "controls": [chosen]}


def controls(*ids: str, **fields: Any) -> dict[str, Any]:
    """Return a request with controls; `fields` are those of the last one."""
    chosen = [{"id": name, "image": data_url(8, 8, "red")} for name in ids]
    return {"model": "painter", "controls": [*chosen[:-1], {**chosen[-1], **fields}]}


INVALID_REQUESTS = [
    ({"model": "film", "last_image": UNKNOWN}, "invalid_request", "image"),
    ({"model": "film", "image": data_url(8, 8, "red"), "last_image": UNKNOWN}, "invalid_input_image", "last_image"),
    (controls("edges", "lines"), "invalid_request", "controls.1.id"),
    (controls("edges", "edges"), "invalid_request", "controls.1.id"),
    (controls("edges", "depth", "style"), "invalid_request", "controls"),
    (controls(*["edges"] * 5), "invalid_request", "controls"),
    (controls("depth", scale=0.9), "invalid_request", "controls.0.scale"),
    (controls("depth", scale=-0.1), "invalid_request", "controls.0.scale"),
    (controls("depth", scale="much"), "invalid_request", "controls.0.scale"),
    (controls("edges", start=0.5, end=0.5), "invalid_request", "controls.0.end"),
    (controls("edges", start=1.0), "invalid_request", "controls.0.start"),
    (controls("style", end=0.5), "invalid_request", "controls.0.end"),
    (controls("like", start=0.5), "invalid_request", "controls.0.start"),
    (controls("edges", end=1.1), "invalid_request", "controls.0.end"),
    (controls("edges", weight=1), "invalid_request", "controls.0.weight"),
    (controls("edges", image=UNKNOWN), "invalid_input_image", "controls.0.image"),
    (controls("edges", "depth", image="data:,"), "invalid_input_image", "controls.1.image"),
    (controls("edges", image="https://127.0.0.1/a.png"), "invalid_input_image", "controls.0.image"),
    ({"model": "painter", "controls": [{"id": "edges"}]}, "invalid_request", "controls.0.image"),
    (controls("edges") | {"model": "film"}, "invalid_request", "controls"),
    (follows("outline", scale=0.5), "invalid_request", "controls.0.scale"),
    (follows("outline", start=0.5), "invalid_request", "controls.0.start"),
    ({**follows("outline"), "controls": []}, "invalid_request", "controls"),
    ({**follows("outline"), "task": "edit"}, "invalid_request", "controls"),
    (controls("edges") | {"model": "editor", "image": UNKNOWN}, "invalid_request", "controls"),
    ({"model": "editor", "images": [data_url(8, 8, "red"), UNKNOWN]}, "invalid_input_image", "images.1"),
    ({"model": "editor", "images": ["https://127.0.0.1/a.png"]}, "invalid_input_image", "images.0"),
    ({"model": "editor", "images": [UNKNOWN] * 17}, "invalid_request", "images"),
    ({"model": "editor", "images": UNKNOWN}, "invalid_request", "images"),
    ({"model": "painter", "image": data_url(8, 8, "red"), "mask": "data:,"}, "invalid_input_image", "mask"),
    (
        {"model": "painter", "image": data_url(64, 32, "red"), "mask": data_url(64, 64, "red")},
        "invalid_request",
        "mask",
    ),
]


async def test_an_invalid_request_names_its_field(api: httpx.AsyncClient, fake_queue: Queue) -> None:
    """No job is created."""
    for body, code, param in INVALID_REQUESTS:
        with row(code, param):
            answer = await api.post("/v1/jobs", json={"prompt": "x", **body})
            assert answer.status_code == 422
            assert (answer.json()["code"], answer.json()["error"]["param"]) == (code, param), answer.text
            assert (await fake_queue.jobs.page("default"))[0] == []


async def test_models_list_their_limits(api: httpx.AsyncClient) -> None:
    """A client can read the allowed frames and images."""
    models = {model["id"]: model for model in (await api.get("/v1/models")).json()["data"]}
    assert models["film"]["limits"]["frames_multiple"] == 4
    assert models["film"]["defaults"]["fps"] == 16
    assert models["editor"]["limits"]["max_input_images"] == 3
    assert models["editor"]["tasks"] == ["edit"]
    assert models["painter"]["limits"]["max_controls"] == 2
    assert models["painter"]["controls"][1] == {
        "id": "depth",
        "kind": "controlnet",
        "scale": 0.6,
        "max_scale": 0.8,
    }
    assert models["editor"]["controls"] == models["editor"]["adapters"] == []
    assert models["painter"]["adapters"] == [
        {"id": "ink", "kind": "lora", "token": None, "scale": 0.8, "max_scale": 2.0}
    ]
