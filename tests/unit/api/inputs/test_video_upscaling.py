"""Upscale factors of requests: those of a model whose folder says which it has."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.http_server import serving
from harness.videos import a_video_file

from shared.queue import Queue

MODELS = """
[[model]]
id = "tiles"
source = "{folder}"
tasks = ["upscale_video"]
[model.defaults]
width = 256
height = 256
steps = 2
[model.limits]
max_frames = 81
max_side = 512
frames_multiple = 4

[[model]]
id = "unknown"
source = "acme/upscaler"
tasks = ["upscale_video"]
[model.limits]
max_frames = 81

[[model]]
id = "painter"
source = "x"
"""


@pytest.fixture
async def api(fake_queue: Queue, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    folder, models = tmp_path / "model", tmp_path / "models.toml"
    (folder / "vae").mkdir(parents=True)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "Kandinsky6SRPipeline"}))
    (folder / "vae/config.json").write_text(json.dumps({"encoder_block_out_channels": [4, 8, 16]}))
    models.write_text(MODELS.format(folder=folder))
    async with serving(fake_queue, tmp_path, models=models) as client:
        yield client


@pytest.fixture
async def video(api: httpx.AsyncClient) -> str:
    file = a_video_file(9, 8, size=(96, 80))
    return str((await api.post("/v1/inputs", files={"file": ("a.mp4", file)})).json()["id"])


@pytest.mark.parametrize(
    ("sent", "factor", "size"),
    [
        ({}, 2.25, (216, 176)),  # 24 and 20 latents of 4 pixels become 27 and 22.5, rounded, of 8
        ({"upscale_factor": 2}, 2, (192, 160)),
        ({"upscale_factor": 4}, 4, (384, 320)),
        ({"upscale_factor": 4, "width": 256, "height": 64}, 4, (256, 64)),
    ],
)
async def test_the_size_of_a_result_follows_from_its_factor(
    api: httpx.AsyncClient, video: str, sent: dict[str, Any], factor: float, size: tuple[int, int]
) -> None:
    response = await api.post("/v1/jobs", json={"model": "tiles", "video": video, **sent})
    assert response.status_code == 202, response.text
    job = response.json()
    assert (job["upscale_factor"], (job["width"], job["height"]), job["frames"]) == (factor, size, 9)


@pytest.mark.parametrize(
    ("sent", "param", "said"),
    [
        ({"upscale_factor": 3}, "upscale_factor", "model 'tiles' takes 2.25, 2, 4, not 3"),
        ({"upscale_factor": 4, "width": 256, "height": 72}, "height", "makes 64, not 72"),
        ({"width": 40, "height": 64}, "width", "width must be 64 to 512"),
        ({"width": 104, "height": 64}, "width", "by upscale_factor 2.25 model 'tiles' makes 96, not 104"),
        ({"width": 100, "height": 64}, "width", "multiple of 8, not 100"),
        ({"frames": 8}, "frames", "a multiple of 4 plus 1, not 8"),
        ({"model": "painter", "video": None, "upscale_factor": 2}, "upscale_factor", "text_to_image takes none"),
    ],
)
async def test_a_factor_and_sides_that_a_model_does_not_make_are_refused(
    api: httpx.AsyncClient, video: str, sent: dict[str, Any], param: str, said: str
) -> None:
    body = {"model": "tiles", "prompt": "x", "video": video, **sent}
    response = await api.post("/v1/jobs", json=body)
    assert response.status_code == 422, response.text
    [fault] = response.json()["errors"]
    assert fault["param"] == param
    assert said in fault["message"]


async def test_the_models_worker_decides_where_its_files_are_not_known(api: httpx.AsyncClient, video: str) -> None:
    """A request without a factor leaves it to the pipeline."""
    for sent, factor, width in (({}, None, 192), ({"upscale_factor": 4}, 4, 384)):
        response = await api.post("/v1/jobs", json={"model": "unknown", "video": video, **sent})
        assert response.status_code == 202, response.text
        assert (response.json()["upscale_factor"], response.json()["width"]) == (factor, width)


async def test_models_say_their_factors(api: httpx.AsyncClient) -> None:
    factors = {one["id"]: one["upscale_factors"] for one in (await api.get("/v1/models")).json()["data"]}
    assert factors == {"tiles": [2.25, 2, 4], "unknown": [], "painter": []}
