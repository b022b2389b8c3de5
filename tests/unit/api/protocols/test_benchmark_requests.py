"""Requests as the serving benchmarks of vLLM-Omni and SGLang send them, recorded field by field: all succeed.

`FormData` is that of aiohttp, with which both send forms: URL-encoded without a file, multipart with one.
"""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import FormData
from harness.http_server import serving, working
from harness.tables import row
from PIL import Image

from shared.queue import Queue

MODELS = """
[[model]]
id = "Qwen/Qwen-Image"
source = "x"
tasks = ["text_to_image"]
defaults = { width = 1024, height = 1024 }
limits = { max_side = 2048 }
[[model.adapter]]
id = "ink"
source = "."

[[model]]
id = "Qwen/Qwen-Image-Edit"
source = "x"
tasks = ["edit"]
defaults = { width = 1024, height = 1024 }
limits = { max_side = 2048, max_input_images = 3 }

[[model]]
id = "Wan-AI/Wan2.2-I2V-A14B-Diffusers"
source = "x"
tasks = ["text_to_video", "image_to_video"]
defaults = { width = 832, height = 480, frames = 81, fps = 16, guidance_scale_2 = 3.0 }
limits = { max_side = 1280, max_frames = 121, frames_multiple = 4 }
"""
IMAGE, EDIT, VIDEO = "Qwen/Qwen-Image", "Qwen/Qwen-Image-Edit", "Wan-AI/Wan2.2-I2V-A14B-Diffusers"
GENERATIONS, EDITS, VIDEOS = "/v1/images/generations", "/v1/images/edits", "/v1/videos"
PROMPT = "Random prompt 0 for benchmarking diffusion models"
VBENCH = "a bear catching a salmon in its powerful jaws"


@pytest.fixture
async def api(fake_queue: Queue, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an API whose image jobs a worker finishes."""
    (tmp_path / "models.toml").write_text(MODELS)
    async with (
        serving(fake_queue, tmp_path, models=tmp_path / "models.toml") as client,
        working(fake_queue, tmp_path, IMAGE, EDIT),
    ):
        yield client


def jpeg() -> bytes:
    """The image that both benchmarks make without a data set."""
    file = io.BytesIO()
    Image.new("RGB", (100, 100), "red").save(file, "JPEG")
    return file.getvalue()


async def form(fields: dict[str, str], file: tuple[str, str] | None = None) -> tuple[dict[str, str], bytes]:
    """Return headers and body of a form; `file` is the field and the content type of the image."""
    data = FormData()
    for name, value in fields.items():
        data.add_field(name, value)
    if file is not None:
        data.add_field(file[0], jpeg(), filename="dummy_image.jpg", content_type=file[1])
    payload = data()
    return {"Content-Type": payload.headers["Content-Type"]}, await payload.as_bytes()


async def send(api: httpx.AsyncClient, path: str, encoded: tuple[dict[str, str], bytes]) -> dict[str, Any]:
    headers, body = encoded
    response = await api.post(path, content=body, headers=headers, timeout=60)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def as_json(body: dict[str, Any]) -> tuple[dict[str, str], bytes]:
    return {"Content-Type": "application/json", "Authorization": "Bearer EMPTY"}, json.dumps(body).encode()


def ignored(answer: dict[str, Any]) -> list[str]:
    return [warning["param"] for warning in answer["warnings"]]


VLLM_IMAGE = {
    "model": IMAGE,
    "prompt": PROMPT,
    "n": 1,
    "size": "1024x1024",
    "response_format": "b64_json",
    "seed": 42,
    "num_inference_steps": 20,
}
HUNYUAN = {"bot_task": "think", "use_system_prompt": "en_unified", "guidance_scale": 5.0, "flow_shift": 3.0}
IMAGES: list[tuple[dict[str, Any], list[str]]] = [
    (VLLM_IMAGE, []),
    ({**VLLM_IMAGE, "true_cfg_scale": 4.0, "negative_prompt": " ", "vae_use_slicing": False}, ["vae_use_slicing"]),
    ({**VLLM_IMAGE, **HUNYUAN, "extra_params": {"cot": True}}, ["bot_task", "extra_params", "flow_shift"]),
    (
        {**VLLM_IMAGE, "enable_teacache": True, "generator_device": "cuda", "output_quality": "default"},
        ["enable_teacache", "generator_device", "output_quality"],
    ),
]


async def test_images_as_json(api: httpx.AsyncClient) -> None:
    """`warnings` names the fields that have no effect; the others reach the job."""
    for body, without_effect in IMAGES:
        with row(body):
            answer = await send(api, GENERATIONS, as_json(body))
            assert len(answer["data"]) == 1
            assert answer["data"][0]["b64_json"]
            assert set(without_effect) <= set(ignored(answer))
            job = (await api.get(f"/v1/jobs/{answer['id']}")).json()
            for name, sent in (
                ("steps", "num_inference_steps"),
                ("true_cfg_scale", "true_cfg_scale"),
                ("seed", "seed"),
            ):
                assert sent not in body or job[name] == body[sent]


VLLM_EDIT = {
    "model": EDIT,
    "prompt": VBENCH,
    "size": "1024x1024",
    "response_format": "b64_json",
    "num_inference_steps": "20",
    "seed": "42",
    "guidance_scale": "1.0",
    "negative_prompt": " ",
    "sys_type": "en_unified",
    "system_prompt": "You edit images.",
    "bot_task": "think",
}
SGLANG_EDIT = {"model": EDIT, "prompt": "A moving cat", "response_format": "b64_json", "size": "1024x1024"}


EDIT_FORMS = [
    (VLLM_EDIT, "image/jpeg"),
    ({**VLLM_EDIT, "true_cfg_scale": "4.0"}, "image/jpeg"),
    (SGLANG_EDIT, "application/octet-stream"),
    # its `--extra-body`, as `str` writes the values
    (
        {**SGLANG_EDIT, "num_inference_steps": "8", "enable_teacache": "False", "seed": "None"},
        "application/octet-stream",
    ),
]


async def test_edits_as_multipart(api: httpx.AsyncClient) -> None:
    """The image is smaller than the model's size."""
    for fields, content_type in EDIT_FORMS:
        with row(fields):
            answer = await send(api, EDITS, await form(fields, ("image", content_type)))
            assert answer["data"][0]["b64_json"]
            job = (await api.get(f"/v1/jobs/{answer['id']}")).json()
            assert (job["task"], job["steps"]) == ("edit", int(fields.get("num_inference_steps", job["steps"])))
            assert ("bot_task" in ignored(answer)) == ("bot_task" in fields)


VLLM_VIDEO = {"prompt": PROMPT, "height": "480", "width": "832", "num_frames": "81", "num_inference_steps": "40"}
WAN = {"flow_shift": "5.0", "boundary_ratio": "0.875", "guidance_scale_2": "3.0", "negative_prompt": "blurred"}


VIDEO_FORMS = [
    (VLLM_VIDEO, None, 81),
    ({**VLLM_VIDEO, "seed": "42", "fps": "16", **WAN}, None, 81),
    ({**VLLM_VIDEO, "num_frames": "80", "fps": "16"}, None, 81),  # the example of its help; models of Wan round it
    ({**VLLM_VIDEO, "seed": "42", "enable_frame_interpolation": "True"}, ("input_reference", "image/jpeg"), 81),
    (
        {
            "model": VIDEO,
            "prompt": "A moving cat",
            "size": "832x480",
            "extra_body": '{"num_inference_steps": 8, "num_outputs_per_prompt": 1, "enable_teacache": true}',
            "num_frames": "33",
            "fps": "16",
        },
        ("input_reference", "application/octet-stream"),
        33,
    ),
]


async def test_videos_as_forms(api: httpx.AsyncClient) -> None:
    """URL-encoded without a image, multipart with one; then polled and deleted as the benchmarks do."""
    for fields, file, frames in VIDEO_FORMS:
        with row(fields):
            encoded = await form(fields, file)
            assert encoded[0]["Content-Type"].startswith("multipart/" if file else "application/x-www-form-urlencoded")
            answer = await send(api, VIDEOS, encoded)
            assert (answer["object"], answer["status"], answer["size"]) == ("video", "queued", "832x480")
            job = (await api.get(f"/v1/jobs/{answer['id'].replace('video', 'job')}")).json()
            assert (job["task"], job["frames"]) == ("image_to_video" if file else "text_to_video", frames)
            assert job["steps"] == (8 if "extra_body" in fields else 40)
            polled = await api.get(f"{VIDEOS}/{answer['id']}")
            assert (polled.status_code, polled.json()["status"]) == (200, "queued")
            assert (await api.delete(f"{VIDEOS}/{answer['id']}")).status_code == 200


async def test_an_idempotency_key_is_one_video(api: httpx.AsyncClient) -> None:
    body, headers = {"model": VIDEO, "prompt": VBENCH}, {"Idempotency-Key": "film-1"}
    first, second = [await api.post(VIDEOS, json=body, headers=headers) for _ in range(2)]
    assert (first.status_code, first.json()["id"]) == (200, second.json()["id"])
    assert second.headers["Idempotent-Replayed"] == "true"
    assert (await api.post(VIDEOS, json={**body, "seed": 1}, headers=headers)).status_code == 400


@pytest.mark.parametrize("extra", [{}, {"num_inference_steps": 8, "enable_teacache": True, "true_cfg_scale": 4.0}])
async def test_videos_as_json(api: httpx.AsyncClient, extra: dict[str, Any]) -> None:
    body = {"model": VIDEO, "prompt": VBENCH, "size": "832x480", "num_frames": 81, "fps": 16, **extra}
    answer = await send(api, VIDEOS, as_json(body))
    assert ignored(answer) == (["enable_teacache"] if extra else [])
    job = (await api.get(f"/v1/jobs/{answer['id'].replace('video', 'job')}")).json()
    assert job["true_cfg_scale"] == extra.get("true_cfg_scale")


LORAS = [
    ({"name": "ink", "path": "/loras/ink", "scale": 0.8, "int_id": 3}, 0.8, ["lora.int_id", "lora.path"]),
    ([{"lora_name": "ink", "lora_scale": 0.8, "local_path": "/loras/ink"}], 0.8, ["lora.local_path"]),
    ('{"name": "ink"}', 1.0, []),
    ("ink", 1.0, []),
    (["ink"], 1.0, []),
]


async def test_an_adapter_is_named_as_other_servers_do(api: httpx.AsyncClient) -> None:
    for lora, scale, without_effect in LORAS:
        with row(lora):
            answer = await send(api, GENERATIONS, as_json({"model": IMAGE, "prompt": PROMPT, "lora": lora}))
            assert ignored(answer) == without_effect
            job = (await api.get(f"/v1/jobs/{answer['id']}")).json()
            assert job["adapters"] == [{"id": "ink", "scale": scale}]


NOT_ALLOWED = [
    {"path": "/loras/ink"},
    {"path": "owner/ink"},
    {"lora_path": "https://files.example/a.safetensors"},
    {"name": "oil"},
    7,
]


async def test_an_adapter_that_is_not_allowed_is_an_error(api: httpx.AsyncClient) -> None:
    for lora in NOT_ALLOWED:
        with row(lora):
            response = await api.post(GENERATIONS, json={"model": IMAGE, "prompt": PROMPT, "lora": lora})
            assert response.status_code == 400
            assert response.json()["error"]["param"].startswith("adapters.0"), response.text


async def test_the_service_is_found_ready(api: httpx.AsyncClient) -> None:
    assert (await api.get("/health")).json() == (await api.get("/healthz")).json() == {"status": "ok"}


UNKNOWN_FIELDS = [
    (GENERATIONS, {**VLLM_IMAGE, "flow_shfit": 3.0}, "flow_shfit"),
    (GENERATIONS, {**VLLM_IMAGE, "extra_body": {"stepz": 3}}, "stepz"),
    (VIDEOS, {"prompt": PROMPT, "extra_body": "[1]"}, "extra_body"),
    (VIDEOS, {"prompt": PROMPT, "extra_body": "{"}, "extra_body"),
]


async def test_an_unknown_field_is_an_error(api: httpx.AsyncClient) -> None:
    for path, body, unknown in UNKNOWN_FIELDS:
        with row(path, unknown):
            response = await api.post(path, json=body)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == unknown
