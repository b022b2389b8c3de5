"""Latents of one job as the image that another one continues: checked like images, and only where they can be used."""

from __future__ import annotations

import base64
import json
import math
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.http_server import WORKER, bearer, next_claim, png, serving
from tiny.safetensors_file import file_of, raw_file

from shared.job import State
from shared.job_record import Artifact, Outcome
from shared.queue import Queue
from shared.storage import connect

MODELS = """
[[model]]
id = "base"
source = "base"
tasks = ["text_to_image", "image_to_image", "inpaint"]
window_ms = 0

[[model]]
id = "refiner"
source = "refiner"
tasks = ["image_to_image", "inpaint"]

[[model]]
id = "other"
source = "other"
tasks = ["text_to_image", "image_to_image"]
"""
CLASSES = {
    "base": "StableDiffusionXLPipeline",
    "refiner": "StableDiffusionXLImg2ImgPipeline",
    "other": "StableDiffusionPipeline",
}
BASE = {"model": "base", "prompt": "a hill", "denoising_end": 0.8, "output_format": "latent"}
REFINER = {"model": "refiner", "prompt": "a hill", "denoising_start": 0.8}
TYPE = "application/safetensors"


def latents(*shape: int, name: str = "latents", value: float = 0.5) -> bytes:
    return file_of({name: (shape, [value] * math.prod(shape))})


GOOD = latents(1, 4, 8, 12)


@pytest.fixture
async def api(fake_queue: Queue, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    for name, pipeline in CLASSES.items():
        (tmp_path / name / "vae").mkdir(parents=True)
        (tmp_path / name / "model_index.json").write_text(json.dumps({"_class_name": pipeline}))
        (tmp_path / name / "vae" / "config.json").write_text(json.dumps({"block_out_channels": [8, 8, 16, 16]}))
    (tmp_path / "models.toml").write_text(MODELS)
    async with serving(fake_queue, tmp_path, auth="keys", models=tmp_path / "models.toml") as client:
        yield client


@pytest.fixture
async def acme(fake_queue: Queue) -> dict[str, str]:
    return await bearer(fake_queue, "acme")


async def first_job(api: httpx.AsyncClient, queue: Queue, folder: Path, headers: dict[str, str]) -> dict[str, Any]:
    """Run the job of the base as a worker does, and return it."""
    response = await api.post("/v1/jobs", json=BASE, headers=headers)
    assert response.status_code == 202, response.text
    claim = await next_claim(queue, "base")
    storage = connect(queue.client.settings.model_copy(update={"storage_dir": folder / "storage"}))
    key = f"jobs/{claim.job.id}/{claim.epoch}/0.safetensors"
    await storage.put(key, GOOD, TYPE)
    await storage.close()
    about: dict[str, Any] = {"width": 12, "height": 8, "seed": 1, "kind": "latents"}
    artifact = Artifact(index=0, key=key, content_type=TYPE, bytes=len(GOOD), **about)
    assert await queue.claims.settle(
        WORKER, claim.job.id, claim.epoch, Outcome(state=State.SUCCEEDED, artifacts=(artifact,))
    )
    job: dict[str, Any] = (await api.get(f"/v1/jobs/{claim.job.id}", headers=headers)).json()
    return job


async def test_the_second_job_takes_the_latents_of_the_first(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path, acme: dict[str, str]
) -> None:
    """By the id of the job or the URL of the artifact; the size is that of the latents."""
    first = await first_job(api, fake_queue, tmp_path, acme)
    (artifact,) = first["artifacts"]
    assert (first["denoising_end"], first["output_format"]) == (0.8, "latent")
    assert (artifact["kind"], artifact["content_type"]) == ("latents", TYPE)
    file = await api.get(artifact["url"], headers=acme)
    assert (file.content, file.headers["content-type"]) == (GOOD, TYPE)
    for image in (first["id"], artifact["url"]):
        response = await api.post("/v1/jobs", json={**REFINER, "image": image}, headers=acme)
        assert response.status_code == 202, response.text
        job = response.json()
        assert (job["task"], job["strength"], job["denoising_start"]) == ("image_to_image", None, 0.8)
        assert (job["width"], job["height"]) == (96, 64)
        assert (job["image"]["content_type"], job["image"]["width"]) == (TYPE, 12)


async def test_another_tenant_cannot_use_them(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path, acme: dict[str, str]
) -> None:
    first = await first_job(api, fake_queue, tmp_path, acme)
    other = await bearer(fake_queue, "other")
    for image in (first["id"], first["artifacts"][0]["url"]):
        response = await api.post("/v1/jobs", json={**REFINER, "image": image}, headers=other)
        assert response.status_code == 422
        assert response.json()["error"]["param"] == "image"
        assert "there is no job" in response.json()["detail"]


@pytest.mark.parametrize("as_url", [False, True])
async def test_latents_made_elsewhere_can_be_sent(as_url: bool, api: httpx.AsyncClient, acme: dict[str, str]) -> None:
    image = f"data:{TYPE};base64,{base64.b64encode(GOOD).decode()}"
    if not as_url:
        uploaded = await api.post("/v1/inputs", files={"file": ("a.safetensors", GOOD)}, headers=acme)
        image = uploaded.json()["id"]
        stored = await api.get(f"/v1/inputs/{image}/content", headers=acme)
        assert stored.headers["content-type"] == TYPE
    response = await api.post("/v1/jobs", json={**REFINER, "image": image}, headers=acme)
    assert response.status_code == 202, response.text


HALVES = raw_file({"latents": {"dtype": "F16", "shape": [1, 4, 1, 1], "data_offsets": [0, 8]}}, b"\0\x7c" * 4)
INTEGERS = raw_file({"latents": {"dtype": "I64", "shape": [1, 4, 1, 1], "data_offsets": [0, 32]}}, bytes(32))


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        (latents(1, 4, 8, 12, name="samples"), "one tensor, latents, not samples"),
        (file_of({"latents": ([1, 4, 1, 1], [0] * 4), "more": ([1], [0])}), "not latents, more"),
        (latents(4, 8, 12), "its shape must be [1, 4, height, width]"),
        (latents(2, 4, 8, 12), "its shape must be [1, 4, height, width]"),
        (latents(1, 16, 8, 12), "its shape must be [1, 4, height, width]"),
        (latents(1, 4, 1, 1025), "up to 1024"),
        (latents(1, 4, 8, 12, value=math.nan), "not finite"),
        (latents(1, 4, 8, 12, value=math.inf), "not finite"),
        (HALVES, "not finite"),
        (INTEGERS, "latents is I64; use F32, F16, BF16"),
        (GOOD[:-4], "incomplete"),
        (GOOD + b"more", "incomplete or has more"),
        (array("f", [0.5] * 384).tobytes(), "unsupported image"),
        (b"PK\x03\x04" + bytes(64), "unsupported image"),
    ],
)
async def test_wrong_latents_are_refused(
    file: bytes, reason: str, api: httpx.AsyncClient, acme: dict[str, str]
) -> None:
    image = f"data:{TYPE};base64,{base64.b64encode(file).decode()}"
    response = await api.post("/v1/jobs", json={**REFINER, "image": image}, headers=acme)
    assert response.status_code == 422
    assert response.json()["error"]["param"] == "image"
    assert reason in response.json()["detail"]
    assert (await api.get("/v1/inputs", headers=acme)).json()["data"] == []


async def test_notes_are_dropped(api: httpx.AsyncClient, acme: dict[str, str]) -> None:
    header = {
        "__metadata__": {"parameters": "a secret"},
        "latents": {"dtype": "F32", "shape": [1, 4, 1, 1], "data_offsets": [0, 16]},
    }
    files = {"file": ("a.safetensors", raw_file(header, bytes(16)))}
    image = (await api.post("/v1/inputs", files=files, headers=acme)).json()["id"]
    assert b"secret" not in (await api.get(f"/v1/inputs/{image}/content", headers=acme)).content


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"model": "other", "strength": 0.5}, "image"),
        ({"model": "base", "mask": "LATENTS"}, "mask"),
        ({"model": "base", "mask": "PNG"}, "image"),
        ({"width": 64}, "width"),
        ({"height": 96}, "height"),
        ({"image": "LARGE"}, "image"),
    ],
)
async def test_latents_are_refused_where_they_have_no_use(
    body: dict[str, Any], field: str, api: httpx.AsyncClient, acme: dict[str, str]
) -> None:
    files = {"LATENTS": GOOD, "LARGE": latents(1, 4, 8, 257), "PNG": png(96, 64)}
    ids = {
        name: (await api.post("/v1/inputs", files={"file": ("a", file)}, headers=acme)).json()["id"]
        for name, file in files.items()
    }
    sent = {"model": "refiner", "prompt": "a hill", "image": "LATENTS", **body}
    response = await api.post(
        "/v1/jobs", json={name: ids.get(str(value), value) for name, value in sent.items()}, headers=acme
    )
    assert response.status_code == 422, response.text
    assert field in [fault["param"] for fault in response.json()["errors"]]


@pytest.mark.parametrize(
    "body",
    [
        {"model": "other"},
        {"model": "base", "image": "in_" + 32 * "0", "mask": "in_" + 32 * "0"},
    ],
)
async def test_results_that_cannot_be_latents(
    body: dict[str, Any], api: httpx.AsyncClient, acme: dict[str, str]
) -> None:
    response = await api.post("/v1/jobs", json={"prompt": "a hill", "output_format": "latent", **body}, headers=acme)
    assert response.status_code == 422
    assert response.json()["error"]["param"] == "output_format"


async def test_other_protocols_return_no_latents(api: httpx.AsyncClient, acme: dict[str, str]) -> None:
    inputs = {"inputs": "a hill", "parameters": {"output_format": "latent"}}
    response = await api.post("/compat/huggingface/base", json=inputs, headers=acme)
    assert response.status_code in (400, 422), response.text
    assert "output_format: latent is not supported by this protocol" in response.text
