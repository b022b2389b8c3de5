"""Videos as inputs: uploaded, sent as data URLs, read again, and refused by the name of their field."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.http_server import png, serving
from harness.videos import a_video_file

from shared.queue import Queue

MODELS = """
[[model]]
id = "remix"
source = "x"
tasks = ["text_to_video", "image_to_video", "video_to_video"]
[model.limits]
max_frames = 81
frames_multiple = 4
"""
DANCER = """
[[model]]
id = "dancer"
source = "x"
tasks = ["animate"]
[model.limits]
max_frames = 81
max_input_frames = 20
"""
ENLARGER = """
[[model]]
id = "enlarger"
source = "x"
tasks = ["upscale_video"]
[model.defaults]
width = 256
height = 256
[model.limits]
max_frames = 81
max_side = 256
multiple_of = 64
max_input_frames = 20

[[model]]
id = "picture-enlarger"
source = "x"
tasks = ["upscale"]
"""
VIDEO = a_video_file(9, 8, size=(96, 64), metadata="secret place")


@pytest.fixture
async def api(fake_queue: Queue, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    models = tmp_path / "models.toml"
    models.write_text(MODELS + DANCER + ENLARGER)
    async with serving(fake_queue, tmp_path, models=models) as client:
        yield client


async def upload(api: httpx.AsyncClient, data: bytes = VIDEO) -> dict[str, Any]:
    response = await api.post("/v1/inputs", files={"file": ("a.mp4", data)})
    assert response.status_code == 201, response.text
    uploaded: dict[str, Any] = response.json()
    return uploaded


async def test_an_uploaded_video_is_described_and_read_without_its_metadata(api: httpx.AsyncClient) -> None:
    uploaded = await upload(api)
    assert {name: uploaded[name] for name in ("kind", "content_type", "width", "height", "frames", "fps")} == {
        "kind": "video",
        "content_type": "video/mp4",
        "width": 96,
        "height": 64,
        "frames": 9,
        "fps": 8.0,
    }
    read = (await api.get(f"/v1/inputs/{uploaded['id']}")).json()
    assert read | {"expires_at": None} == uploaded | {"expires_at": None}
    content = await api.get(f"/v1/inputs/{uploaded['id']}/content")
    assert (content.headers["content-type"], len(content.content)) == ("video/mp4", len(VIDEO))
    assert b"secret place" not in content.content


async def test_an_image_has_no_frames(api: httpx.AsyncClient) -> None:
    uploaded = await upload(api, png())
    assert (uploaded["kind"], uploaded["frames"], uploaded["fps"]) == ("image", None, None)


async def test_an_upload_and_a_data_url_are_the_same_video(api: httpx.AsyncClient) -> None:
    data_url = f"data:video/mp4;base64,{base64.b64encode(VIDEO).decode()}"
    for video in ((await upload(api))["id"], data_url):
        job = (await api.post("/v1/jobs", json={"model": "remix", "prompt": "x", "video": video})).json()
        assert (job["task"], job["frames"], job["fps"], job["video"]["frames"]) == ("video_to_video", 9, 8, 9), job
        retried = (
            await api.post("/v1/jobs", json={"model": "remix", "prompt": "y", "video": job["video"]["id"]})
        ).json()
        assert retried["video"] == job["video"]


async def test_a_file_of_another_kind_is_refused_by_its_field(api: httpx.AsyncClient) -> None:
    video, image = (await upload(api))["id"], (await upload(api, png()))["id"]
    gif = f"data:image/gif;base64,{base64.b64encode(b'GIF89a' + bytes(50)).decode()}"
    for body, param, words in (
        ({"video": image}, "video", "not a video; send an MP4 or MOV"),
        ({"image": video}, "image", "it is a video, not an image; send it as video"),
        ({"image": image, "last_image": video}, "last_image", "takes none"),
        ({"video": gif}, "video", "unsupported video: a GIF; send an MP4 or MOV"),
        ({"video": "no id"}, "video", "video must be an input id"),
        ({"video": video, "frames": 13}, "frames", "frames is at most 9"),
        ({"video": video, "image": image}, "video", "does not support animate"),
    ):
        response = await api.post("/v1/jobs", json={"model": "remix", "prompt": "x", **body})
        fault = response.json()["errors"][0]
        assert (response.status_code, fault["param"]) == (422, param), response.text
        assert words in fault["message"]


async def test_faces_come_with_the_poses_that_an_image_follows(api: httpx.AsyncClient) -> None:
    image, poses = (await upload(api, png()))["id"], (await upload(api))["id"]
    faces = (await upload(api, a_video_file(18, 16, size=(64, 64))))["id"]
    body = {"model": "dancer", "prompt": "x", "image": image, "video": poses, "face_video": faces}
    job = (await api.post("/v1/jobs", json=body)).json()
    assert (job["task"], job["frames"], job["fps"]) == ("animate", 9, 8), job
    assert (job["face_video"]["id"], job["face_video"]["frames"]) == (faces, 18)
    assert job["width"] / job["height"] == 96 / 64  # of the poses, not of the square image


async def test_faces_that_do_not_fit_the_job_are_refused(api: httpx.AsyncClient) -> None:
    image, video = (await upload(api, png()))["id"], (await upload(api))["id"]
    few, many = [(await upload(api, a_video_file(count, 8)))["id"] for count in (8, 21)]
    dancer = {"model": "dancer", "image": image, "video": video}
    for body, words in (
        (dancer | {"face_video": few}, "it has 8 frames at 8 fps, fewer than the 9 of the job"),
        (dancer | {"face_video": many}, "it has 21 frames; model 'dancer' takes at most 20"),
        (dancer | {"face_video": image}, "not a video; send an MP4 or MOV"),
        ({"model": "remix", "video": video, "face_video": few}, "video_to_video takes no face_video"),
    ):
        response = await api.post("/v1/jobs", json={"prompt": "x", **body})
        fault = response.json()["errors"][0]
        assert (response.status_code, fault["param"]) == (422, "face_video"), response.text
        assert words in fault["message"]


async def test_an_upscaled_video_has_twice_its_sides_and_its_own_frames_and_rate(api: httpx.AsyncClient) -> None:
    """Sides are rounded down to what the model makes; those that a request names are those of the result."""
    video = (await upload(api))["id"]
    for sent, size in (({}, (192, 128)), ({"width": 64, "height": 64}, (64, 64))):
        response = await api.post("/v1/jobs", json={"model": "enlarger", "video": video, **sent})
        assert response.status_code == 202, response.text
        job = response.json()
        assert (job["task"], job["prompt"], job["warnings"]) == ("upscale_video", "", [])
        assert ((job["width"], job["height"]), job["frames"], job["fps"]) == (size, 9, 8)


async def test_a_video_that_cannot_be_upscaled_is_refused(api: httpx.AsyncClient) -> None:
    image, video = (await upload(api, png()))["id"], (await upload(api))["id"]
    wide = (await upload(api, a_video_file(9, 8, size=(160, 64))))["id"]
    long = (await upload(api, a_video_file(21, 8)))["id"]
    for body, words in (
        ({"model": "enlarger", "video": wide}, "160x64 becomes 320x128"),
        ({"model": "enlarger", "video": long}, "it has 21 frames; model 'enlarger' takes at most 20"),
        ({"model": "enlarger", "video": image}, "it is an image, not a video"),
        ({"model": "enlarger", "image": image}, "model 'enlarger' needs one; its tasks: upscale_video"),
        ({"model": "picture-enlarger", "video": video}, "does not support"),
    ):
        response = await api.post("/v1/jobs", json=body)
        fault = response.json()["errors"][0]
        assert (response.status_code, fault["param"]) == (422, "video"), response.text
        assert words in fault["message"], fault
