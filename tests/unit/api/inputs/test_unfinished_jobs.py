"""Artifacts of jobs that have not ended as inputs of others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.http_server import deliver, next_claim, serving
from harness.queue import end_retention
from harness.tables import row

from shared.artifact_ref import ArtifactRef
from shared.queue import Queue

MODELS = """
[[model]]
id = "painter"
source = "x"
tasks = ["text_to_image", "image_to_image", "inpaint", "edit", "upscale"]
window_ms = 0
[model.defaults]
width = 128
height = 128
[model.limits]
multiple_of = 8
min_side = 64
max_side = 512
max_input_images = 16

[[model]]
id = "film"
source = "x"
tasks = ["text_to_video", "image_to_video"]
[model.defaults]
fps = 24
[model.limits]
max_frames = 81
max_side = 512

[[model]]
id = "remix"
source = "x"
tasks = ["video_to_video"]
[model.defaults]
width = 128
height = 64
[model.limits]
max_frames = 9
min_side = 64

[[model]]
id = "enlarger"
source = "x"
tasks = ["upscale_video"]
[model.defaults]
width = 256
height = 256
[model.limits]
max_frames = 9
max_side = 256

[[model]]
id = "band"
source = "x"
tasks = ["text_to_audio", "audio_to_audio"]
[model.limits]
max_duration_s = 60
"""
WAITING = {"position": None, "eta_s": None, "reason": "waiting"}
PICTURE = {"model": "painter", "prompt": "a red circle", "width": 64, "height": 128}


@pytest.fixture
async def api(fake_queue: Queue, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    models = tmp_path / "models.toml"
    models.write_text(MODELS, "utf-8")
    async with serving(fake_queue, tmp_path, models=models) as client:
        yield client


async def submit(api: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await api.post("/v1/jobs", json={**PICTURE, **fields})
    assert response.status_code == 202, response.text
    return dict(response.json())


async def read(api: httpx.AsyncClient, job: dict[str, Any]) -> dict[str, Any]:
    return dict((await api.get(f"/v1/jobs/{job['id']}")).json())


async def test_a_job_starts_from_the_artifact_of_one_that_has_not_run(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path
) -> None:
    first = await submit(api, n=2)
    url = f"http://localhost/v1/jobs/{first['id']}/artifacts/0"
    for image in ({"job": first["id"]}, {"job": first["id"], "artifact": 0}, first["id"], url):
        with row(image):
            child = await submit(api, image=image, task="image_to_image", width=None, height=None)
            assert child["queue"] == WAITING
            assert (child["width"], child["height"], child["after"]) == (64, 128, [])
            shown = {"job": first["id"], "artifact": 0, "id": None, "bytes": None, "width": 64, "height": 128}
            assert child["image"] == shown | {"content_type": "image/png", "duration_s": None}
            assert await read(api, child) == child
    await deliver(fake_queue, tmp_path, await next_claim(fake_queue, "painter"))
    claim = await next_claim(fake_queue, "painter")
    assert claim.job.images[0].source == ArtifactRef(job=first["id"])
    stored = await submit(api, image={"job": first["id"]}, task="image_to_image")
    assert stored["image"]["id"].startswith("in_")


async def test_what_an_artifact_will_be_decides_what_a_job_makes_of_it(api: httpx.AsyncClient) -> None:
    picture = (await submit(api))["id"]
    mask = (await submit(api, width=128, height=256))["id"]
    film = (await submit(api, model="film", task="text_to_video", width=128, height=64, frames=17))["id"]
    sound = (await submit(api, model="band", width=None, height=None, duration_s=7.5))["id"]
    rows: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"image": {"job": picture}, "task": "upscale"}, {"width": 256, "height": 512}),
        ({"image": {"job": picture}, "task": "edit"}, {"width": 88, "height": 184}),
        ({"images": [{"job": picture}, {"job": mask}], "task": "edit"}, {}),
        ({"image": {"job": picture}, "mask": {"job": mask}}, {"width": 64, "height": 128}),
        ({"model": "film", "image": {"job": picture}, "task": "image_to_video"}, {"frames": 81}),
        ({"model": "remix", "video": {"job": film}}, {"width": 128, "height": 64, "frames": 9, "fps": 24}),
        ({"model": "enlarger", "video": {"job": film}}, {"width": 256, "height": 128, "frames": 9, "fps": 24}),
        ({"model": "band", "audio": {"job": sound}}, {"duration_s": 7.5}),
    ]
    for sent, made in rows:
        with row(sent):
            job = await submit(api, **{"width": None, "height": None, **sent})
            assert {name: job[name] for name in made} == made
            assert job["queue"] == WAITING


async def test_an_artifact_that_a_job_cannot_start_from_is_refused_by_its_field(api: httpx.AsyncClient) -> None:
    picture = (await submit(api))["id"]
    wide = (await submit(api, width=128, height=64))["id"]
    sent = (await submit(api, output={"put_url": "https://a.example/b"}))["id"]
    film = (await submit(api, model="film", task="text_to_video", frames=17))["id"]
    large = (await submit(api, model="film", task="text_to_video", width=256, frames=9))["id"]
    pictures = [(await submit(api))["id"] for _ in range(17)]
    rows: list[tuple[dict[str, Any], str, str]] = [
        ({"image": {"job": picture, "artifact": 1}}, "image", "artifact is at most 0, not 1"),
        ({"image": {"job": "job_" + 26 * "0"}}, "image", "there is no job"),
        ({"image": {"job": sent}}, "image", "not stored here"),
        ({"image": {"job": film}}, "image", "is a video, not an image"),
        ({"images": [{"job": picture}, {"job": film}], "task": "edit"}, "images.1", "is a video, not an image"),
        ({"model": "remix", "video": {"job": picture}}, "video", "is an image, not a video"),
        ({"model": "enlarger", "video": {"job": picture}}, "video", "is an image, not a video"),
        ({"model": "enlarger", "video": {"job": large}, "width": None, "height": None}, "video", "becomes 512x256"),
        ({"image": {"job": picture}, "mask": {"job": wide}}, "mask", "must have the same proportions"),
        ({"image": {"job": pictures[0]}, "after": pictures[1:]}, "after", "waits for 17 others"),
    ]
    for fields, param, fault in rows:
        with row(fields):
            task = {} if {"mask", "video", "task"} & fields.keys() else {"task": "image_to_image"}
            refused = await api.post("/v1/jobs", json={**PICTURE, "width": None, "height": None, **task, **fields})
            assert (refused.status_code, refused.json()["error"]["param"]) == (422, param), refused.text
            assert fault in refused.json()["detail"]


async def test_a_job_that_others_start_from_cannot_be_deleted(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path
) -> None:
    first = await submit(api)
    child = await submit(api, image={"job": first["id"]}, task="image_to_image")
    await deliver(fake_queue, tmp_path, await next_claim(fake_queue, "painter"))
    refused = await api.delete(f"/v1/jobs/{first['id']}")
    assert refused.status_code == 409
    assert child["id"] in refused.json()["detail"]
    many = await api.delete("/v1/jobs", params={"model": "painter"})
    assert many.json()["ids"] == []
    await end_retention(fake_queue, first["id"])
    assert (await api.get((await read(api, first))["artifacts"][0]["url"])).status_code == 200
    await api.post(f"/v1/jobs/{child['id']}/cancel")
    assert (await api.delete(f"/v1/jobs/{first['id']}")).status_code == 204
    again = await api.post(f"/v1/jobs/{child['id']}/retry")
    assert (again.status_code, again.json()["error"]["param"]) == (422, "image")
    assert f"there is no job {first['id']}" in again.json()["detail"]


async def test_a_job_fails_with_the_one_that_it_starts_from_and_a_retry_starts_from_its_result(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path
) -> None:
    first = await submit(api)
    child = await submit(api, image={"job": first["id"]}, task="image_to_image", on_parent_failure="run")
    await api.post(f"/v1/jobs/{first['id']}/cancel")
    await fake_queue.maintenance.queue_due()
    failed = await read(api, child)
    assert (failed["status"], failed["error"]["code"]) == ("failed", "parent_failed")
    refused = await api.post(f"/v1/jobs/{child['id']}/retry")
    assert (refused.status_code, refused.json()["error"]["param"]) == (422, "image")
    second = await submit(api)
    other = await submit(api, image={"job": second["id"]}, task="image_to_image")
    await api.post(f"/v1/jobs/{other['id']}/cancel")
    waits = (await api.post(f"/v1/jobs/{other['id']}/retry")).json()
    assert (waits["queue"], waits["image"]["job"]) == (WAITING, second["id"])
    await api.post(f"/v1/jobs/{waits['id']}/cancel")
    await deliver(fake_queue, tmp_path, await next_claim(fake_queue, "painter"))
    again = (await api.post(f"/v1/jobs/{waits['id']}/retry")).json()
    assert again["image"]["id"].startswith("in_")
    assert again["queue"] != WAITING


async def test_retries_start_from_those_of_their_sources(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path
) -> None:
    """Together or one after the other; a source that has succeeded is not made again."""
    first = await submit(api, group="nightly")
    child = await submit(api, image={"job": first["id"]}, task="image_to_image", group="nightly")
    await api.post(f"/v1/jobs/{first['id']}/cancel")
    await fake_queue.maintenance.queue_due()
    new_ids = (await api.post("/v1/jobs:retry?group=nightly")).json()["new_ids"]
    again = (await api.get(f"/v1/jobs/{new_ids[child['id']]}")).json()
    assert (again["image"]["job"], again["queue"]) == (new_ids[first["id"]], WAITING)
    await api.post(f"/v1/jobs/{again['id']}/cancel")
    await deliver(fake_queue, tmp_path, await next_claim(fake_queue, "painter"))
    copied = (await api.post(f"/v1/jobs/{again['id']}/retry")).json()
    assert copied["image"]["id"].startswith("in_")
    other = await submit(api)
    late = await submit(api, image={"job": other["id"]}, task="image_to_image")
    await api.post(f"/v1/jobs/{other['id']}/cancel")
    await fake_queue.maintenance.queue_due()
    retried = (await api.post(f"/v1/jobs/{other['id']}/retry")).json()
    waits = (await api.post(f"/v1/jobs/{late['id']}/retry")).json()
    assert (waits["image"]["job"], waits["queue"]) == (retried["id"], WAITING)
