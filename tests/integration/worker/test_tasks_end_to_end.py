"""From a request over HTTP to the artifact: inpainted images, control images, videos, sounds, mixed sizes."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import av
import httpx
import numpy as np
import pytest
import safetensors.torch
import torch
from diffusers import StableDiffusionXLImg2ImgPipeline, StableDiffusionXLPipeline
from harness.engine import DIFFUSERS_AND_NUMPY, a_mask_file, an_audio_file, an_image_file
from harness.http_server import serving
from harness.scorers import save_scorer
from harness.videos import a_video_file
from PIL import Image
from tiny import controls, registry

from api import learned_models
from shared.config import models_file
from shared.config.catalog import Catalog
from shared.queue import Queue
from shared.storage import connect
from worker.engine.engine import Engine
from worker.engine.protocol import EngineRequest
from worker.worker import Worker

OLD_NORM = "ignore:.*weight_norm:FutureWarning"  # of diffusers' decoders of sounds
pytestmark = [pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY, OLD_NORM), pytest.mark.timeout(240)]

MODELS = """
[[model]]
id = "painter"
source = "sd"
schedulers = ["DDIM", "Nothing"]
tasks = ["text_to_image", "inpaint"]
[model.defaults]
width = 64
height = 64
steps = 4
[[model.control]]
id = "edges"
source = "edges"

[[model]]
id = "mixer"
source = "z-image"
window_ms = 20000
max_batch = 5
[model.defaults]
width = 64
height = 64
steps = 3
[model.limits]
min_side = 48
multiple_of = 16
max_images = 4

[[model]]
id = "parts"
source = "sdxl"
tasks = ["text_to_image", "image_to_image"]
[model.defaults]
width = 64
height = 64
steps = 4

[[model]]
id = "refined"
source = "sdxl"
tasks = ["text_to_image", "inpaint"]
[model.refiner]
source = "sdxl-refiner"
start = 0.75
[model.defaults]
width = 64
height = 64
steps = 4

[[model]]
id = "film"
source = "wan-2.2-ti2v"
tasks = ["text_to_video", "image_to_video"]
max_batch = 4
[model.defaults]
width = 64
height = 64
steps = 2
frames = 5
fps = 8
[model.limits]
multiple_of = 32
max_frames = 17
frames_multiple = 4
max_images = 4

[[model]]
id = "rated"
source = "sd"
scorer = "clip"
max_batch = 8
[model.defaults]
width = 64
height = 64
steps = 4
[model.limits]
multiple_of = 16
max_images = 8

[[model]]
id = "band"
source = "ace-step"
tasks = ["text_to_audio", "audio_to_audio", "audio_inpaint"]
extra = ["bpm"]
max_batch = 4
[model.defaults]
steps = 2
duration_s = 1
[model.limits]
max_duration_s = 5
max_images = 4

[[model]]
id = "remix"
source = "wan-2.1-t2v"
tasks = ["text_to_video", "video_to_video"]
max_batch = 4
[model.defaults]
width = 64
height = 64
steps = 4
strength = 0.5
frames = 9
fps = 16
[model.limits]
multiple_of = 16
max_frames = 9
frames_multiple = 4
max_images = 4
"""
WAIT_S = 60
_SUBMIT = Engine.submit


@pytest.fixture(scope="module")
def models_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    for name in ("sd", "sdxl", "sdxl-refiner", "z-image", "wan-2.2-ti2v", "wan-2.1-t2v", "ace-step"):
        registry.save_tiny(name, folder / name)
    controls.save(folder / "sd", folder / "edges", 1)
    save_scorer(folder / "clip")
    file = folder / "models.toml"
    file.write_text(MODELS)
    return file


class StackHarness:
    """A client of an API, and a worker that starts after the jobs are queued and starts all of them together."""

    def __init__(self, client: httpx.AsyncClient, worker: Worker, patches: pytest.MonkeyPatch) -> None:
        self.client = client
        self._worker = worker
        self._patches = patches
        self._working: asyncio.Task[int] | None = None

    async def finished(self, *bodies: dict[str, Any]) -> list[dict[str, Any]]:
        """Submit jobs and return them once they have succeeded."""
        self._patches.setattr(Engine, "submit", submitted_together(len(bodies)))
        ids = [(await self.client.post("/v1/jobs", json=body)).json()["id"] for body in bodies]
        self._working = asyncio.create_task(self._worker.run())
        return [await self._ended(job_id) for job_id in ids]

    async def continued(self, body: dict[str, Any]) -> dict[str, Any]:
        """Submit a job beside the running worker, and return it once it has succeeded."""
        self._patches.setattr(Engine, "submit", _SUBMIT)
        response = await self.client.post("/v1/jobs", json=body)
        assert response.status_code == 202, response.text
        return await self._ended(response.json()["id"])

    async def _ended(self, job_id: str) -> dict[str, Any]:
        while True:
            job: dict[str, Any] = (await self.client.get(f"/v1/jobs/{job_id}", params={"wait": WAIT_S})).json()
            if job["status"] not in ("queued", "running"):
                assert job["status"] == "succeeded", job
                return job

    async def close(self) -> None:
        self._worker.drain()
        if self._working is not None:
            assert await asyncio.wait_for(self._working, WAIT_S) == 0


def submitted_together(count: int) -> Callable[..., None]:
    """Return a replacement for `Engine.submit` that holds requests back until there are `count`."""
    submit, held = Engine.submit, list[EngineRequest]()

    def together(engine: Engine, *requests: EngineRequest) -> None:
        held.extend(requests)
        if len(held) == count:
            submit(engine, *held)

    return together


@pytest.fixture
async def stack(
    request: pytest.FixtureRequest,
    durable_server: Any,
    settings_for: Any,
    models_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[StackHarness]:
    """An API and a worker of one model in this process, with a Redis and a storage folder."""
    changes = {"models": models_path, "storage_dir": tmp_path / "storage", "device": "cpu", "torch_threads": 1}
    settings = settings_for(durable_server.url, **changes)
    queue, workers_queue, storage = Queue.connect(settings), Queue.connect(settings), connect(settings)
    spec = models_file.load(models_path).get(request.param)  # the worker loads no other model
    worker = Worker(Catalog((spec,)), workers_queue, storage, settings, Engine)
    async with serving(queue, tmp_path, models=models_path) as client:
        stack = StackHarness(client, worker, monkeypatch)
        yield stack
    await stack.close()
    for resource in (storage, workers_queue, queue):
        await resource.close()


async def upload(api: httpx.AsyncClient, data: bytes) -> str:
    return str((await api.post("/v1/inputs", files={"file": ("a.png", data)})).json()["id"])


@pytest.mark.parametrize("stack", ["painter"], indirect=True)
async def test_the_api_learns_from_the_worker_which_schedulers_it_can_make(
    stack: StackHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learned_models, "EVERY_S", 0.0)
    assert (await stack.client.get("/v1/models/painter")).json()["schedulers"] == ["DDIM", "Nothing"]
    (job,) = await stack.finished({"model": "painter", "prompt": "a cat", "scheduler": "DDIM"})
    assert job["scheduler"] == "DDIMScheduler"
    assert (await stack.client.get("/v1/models/painter")).json()["schedulers"] == ["DDIM"]
    response = await stack.client.post("/v1/jobs", json={"model": "painter", "prompt": "x", "scheduler": "Nothing"})
    assert (response.status_code, response.json()["errors"][0]["param"]) == (422, "scheduler")
    assert "diffusers has no scheduler 'Nothing'; it must be one of: DDIM" in response.json()["errors"][0]["message"]


@pytest.mark.parametrize("stack", ["painter"], indirect=True)
async def test_inpainting_changes_only_the_masked_part(stack: StackHarness) -> None:
    """The response names both inputs; the image is unchanged outside of the mask."""
    api = stack.client
    image_id, mask = await upload(api, an_image_file()), await upload(api, a_mask_file())
    common = {"model": "painter", "image": image_id, "mask": mask, "seed": 3}
    jobs = await stack.finished(*({**common, "prompt": prompt} for prompt in ("a cat", "a red house")))
    for job in jobs:
        assert (job["task"], job["strength"], job["mask"]["id"]) == ("inpaint", 1.0, mask)
        assert [image["id"] for image in job["images"]] == [image_id]
    results = []
    for job in jobs:
        file = await api.get(job["artifacts"][0]["url"])
        results.append(np.asarray(Image.open(io.BytesIO(file.content)).convert("RGB"), int))
    different = np.abs(results[0] - results[1]).mean(axis=(0, 2))  # of each column
    assert different[40:].mean() > 3 * different[:16].mean(), "the prompt shows where the mask is white"


@pytest.mark.parametrize("stack", ["painter"], indirect=True)
async def test_jobs_with_and_without_control_images_share_forwards(stack: StackHarness) -> None:
    """Each image follows its own control image."""
    api = stack.client
    uploaded = [await upload(api, an_image_file(shade)) for shade in (10, 90)]
    common = {"model": "painter", "prompt": "a cat", "seed": 3}
    bodies = [{**common, "controls": [{"id": "edges", "image": one}]} for one in uploaded]
    jobs = await stack.finished(*bodies, common)
    used = [control["image"]["id"] for job in jobs for control in job["controls"]]
    assert used == uploaded
    assert [job["batching"]["max_jobs"] for job in jobs] == [3, 3, 3]
    assert len({(await api.get(job["artifacts"][0]["url"])).content for job in jobs}) == 3


@pytest.mark.parametrize("stack", ["film"], indirect=True)
async def test_text_and_image_to_video_share_forwards(stack: StackHarness) -> None:
    """Both are MP4s of the requested length and rate, with a thumbnail, and can be read in ranges."""
    api = stack.client
    first = await upload(api, an_image_file())
    bodies = [
        {"model": "film", "prompt": "a wave", "steps": 3, "seed": 1},
        {"model": "film", "prompt": "a ship leaves", "steps": 3, "seed": 2, "image": first},
    ]
    jobs = await stack.finished(*bodies)
    assert [job["task"] for job in jobs] == ["text_to_video", "image_to_video"]
    for job in jobs:
        (artifact,) = job["artifacts"]
        assert (artifact["kind"], artifact["frames"], artifact["duration_s"]) == ("video", 5, 0.625)
        data = (await api.get(artifact["url"])).content
        assert len(data) == artifact["bytes"]
        with av.open(io.BytesIO(data)) as file:
            (stream,) = file.streams.video
            assert (stream.average_rate, stream.frames, stream.width, stream.height) == (8, 5, 64, 64)
        thumbnail = await api.get(artifact["thumbnail_url"])
        assert Image.open(io.BytesIO(thumbnail.content)).size == (64, 64)
        partial = await api.get(artifact["url"], headers={"Range": "bytes=100-199"})
        assert (partial.status_code, partial.content) == (206, data[100:200])
    assert max(job["batching"]["max_jobs"] for job in jobs) == 2, [job["batching"] for job in jobs]


@pytest.mark.parametrize("stack", ["remix"], indirect=True)
async def test_videos_are_changed_beside_videos_of_text(stack: StackHarness) -> None:
    """Size, rate and frames are those of the input video; a longer one is cut, and its sound is left out."""
    api = stack.client
    files = [("a.mp4", a_video_file(9, 8, size=(64, 64))), ("b.mov", a_video_file(12, 8, sound=True, container="mov"))]
    uploads = [(await api.post("/v1/inputs", files={"file": file})).json() for file in files]
    assert [(one["kind"], one["frames"], one["fps"]) for one in uploads] == [("video", 9, 8.0), ("video", 12, 8.0)]
    bodies = [{"model": "remix", "prompt": "a wave", "seed": 1, "video": uploads[0]["id"], "strength": 0.75}]
    bodies.append({"model": "remix", "prompt": "fog", "seed": 2, "video": uploads[1]["id"], "width": 64, "height": 64})
    bodies.append({"model": "remix", "prompt": "a ship", "seed": 3, "fps": 8, "width": 64, "height": 64})
    first, second, plain = await stack.finished(*bodies)
    assert [job["task"] for job in (first, second, plain)] == ["video_to_video", "video_to_video", "text_to_video"]
    assert (first["video"]["id"], first["width"], first["height"]) == (uploads[0]["id"], 64, 64)
    assert [warning["message"] for warning in second["warnings"]] == [
        "video: its first 9 of 12 frames at 8 fps are used",
        "video: its sound is not used; the result has none of it",
    ]
    for job in (first, second, plain):
        assert (job["frames"], job["fps"]) == (9, 8)
        assert (job["artifacts"][0]["frames"], job["artifacts"][0]["fps"]) == (9, 8)
    assert [job["batching"]["max_jobs"] for job in (first, second, plain)] == [3, 3, 3]
    again = await stack.continued({"model": "remix", "prompt": "snow", "video": first["id"], "seed": 4})
    assert (again["video"]["frames"], again["strength"], again["warnings"]) == (9, 0.5, [])


SIZES = ((64, 64), (80, 48), (48, 80), (96, 48), (48, 96))


@pytest.mark.parametrize("stack", ["mixer"], indirect=True)
async def test_five_sizes_are_claimed_together_and_share_every_forward(stack: StackHarness) -> None:
    """The model takes a list of images: no job waits for others of its size."""
    bodies = [
        {"model": "mixer", "prompt": f"image {number}", "seed": number, "width": width, "height": height}
        for number, (width, height) in enumerate(SIZES)
    ]
    jobs = await stack.finished(*bodies)
    for job, size in zip(jobs, SIZES, strict=True):
        assert (job["batching"]["max_jobs"], job["batching"]["mean_rows"]) == (5, 5.0), job["batching"]
        file = await stack.client.get(job["artifacts"][0]["url"])
        assert Image.open(io.BytesIO(file.content)).size == size


@pytest.mark.parametrize("stack", ["parts"], indirect=True)
async def test_two_jobs_denoise_an_image_in_parts(stack: StackHarness, models_path: Path) -> None:
    """The second one takes the latents of the first by its id; the image is that of plain diffusers."""
    common = {"model": "parts", "prompt": "a cat", "seed": 3, "guidance_scale": 5.0}
    first, whole = await stack.finished(
        {**common, "denoising_end": 0.6, "output_format": "latent", "embed_parameters": True}, common
    )
    assert first["batching"]["max_jobs"] == 2
    (artifact,) = first["artifacts"]
    assert (artifact["kind"], artifact["content_type"]) == ("latents", "application/safetensors")
    data = (await stack.client.get(artifact["url"])).content
    assert len(data) == artifact["bytes"]
    assert b"a cat" in data[:2000], "the parameters are in its metadata"
    second = await stack.continued({**common, "image": first["id"], "denoising_start": 0.6})
    image = Image.open(io.BytesIO((await stack.client.get(second["artifacts"][0]["url"])).content))

    pipeline = StableDiffusionXLPipeline.from_pretrained(models_path.parent / "sdxl")
    call: dict[str, Any] = {"prompt": "a cat", "num_inference_steps": 4, "guidance_scale": 5.0}
    latents = pipeline(
        **call, width=64, height=64, denoising_end=0.6, output_type="latent", generator=torch.Generator().manual_seed(3)
    ).images
    loaded = safetensors.torch.load(data)["latents"]
    assert float((loaded - latents).abs().max()) <= 1e-4 * float(latents.abs().max())
    following = StableDiffusionXLImg2ImgPipeline(**pipeline.components)
    expected = following(**call, image=loaded, denoising_start=0.6, output_type="pil").images[0]
    assert np.abs(np.asarray(image.convert("RGB"), int) - np.asarray(expected, int)).max() <= 1
    assert whole["artifacts"][0]["kind"] == "image"


@pytest.mark.parametrize("stack", ["refined"], indirect=True)
async def test_one_job_is_denoised_by_a_base_and_its_refiner(stack: StackHarness, models_path: Path) -> None:
    """Beside jobs of another share and without a refiner; the image is that of plain diffusers."""
    api, common = stack.client, {"model": "refined", "prompt": "a cat", "seed": 3, "guidance_scale": 5.0}
    assert (await api.get("/v1/models/refined")).json()["refiner"] == {"start": 0.75, "tasks": ["text_to_image"]}
    assert (await api.get("/v1/models/parts")).json()["refiner"] is None
    for body, reason in (
        ({"model": "parts"}, "refiner_start: model 'parts' has no refiner"),
        ({"denoising_end": 0.5}, "refiner_start excludes denoising_end"),
    ):
        refused = await api.post("/v1/jobs", json={**common, "refiner_start": 0.5, **body})
        assert (refused.status_code, refused.json()["error"]["param"]) == (422, "refiner_start")
        assert reason in refused.json()["error"]["message"]

    jobs = await stack.finished(common, {**common, "refiner_start": 0.5}, {**common, "refiner_start": 1})
    assert [job["refiner_start"] for job in jobs] == [0.75, 0.5, None]
    assert [job["progress"]["total"] for job in jobs] == [4, 4, 4]
    assert [(job["batching"]["max_jobs"], job["batching"]["forwards"]) for job in jobs] == [(3, 4)] * 3

    base = StableDiffusionXLPipeline.from_pretrained(models_path.parent / "sdxl")
    refiner = StableDiffusionXLImg2ImgPipeline.from_pretrained(models_path.parent / "sdxl-refiner", vae=base.vae)
    call: dict[str, Any] = {"prompt": "a cat", "num_inference_steps": 4, "guidance_scale": 5.0}
    for job in jobs[:2]:
        own, start = {"width": 64, "height": 64, "output_type": "latent"}, job["refiner_start"]
        latents = base(**call, **own, denoising_end=start, generator=torch.Generator().manual_seed(3)).images
        expected = refiner(**call, image=latents, denoising_start=start, output_type="pil").images[0]
        image = Image.open(io.BytesIO((await api.get(job["artifacts"][0]["url"])).content))
        assert np.abs(np.asarray(image.convert("RGB"), int) - np.asarray(expected, int)).max() <= 1


@pytest.mark.parametrize("stack", ["rated"], indirect=True)
async def test_a_job_returns_its_best_candidates_and_says_what_was_dropped(stack: StackHarness) -> None:
    """Each kept image has its seed and its score, and equals the job of that seed."""
    api, common = stack.client, {"model": "rated", "prompt": "a cat", "guidance_scale": 5.0}
    assert (await api.get("/v1/models/rated")).json()["scorer"] == "prompt"
    best_of = {"candidates": 6, "keep": 2, "at": [0.25, 0.5]}
    (job,) = await stack.finished({**common, "seed": 7, "best_of": best_of})
    assert (job["best_of"], job["n"], job["progress"]) == (best_of, 2, {"step": 13, "total": 13, "percent": 100})
    kept, dropped = job["artifacts"], job["batching"]["dropped"]
    assert [one["step"] for one in dropped] == [1, 1, 1, 2]
    assert sorted([one["seed"] - 7 for one in kept] + [one["candidate"] for one in dropped]) == [0, 1, 2, 3, 4, 5]
    assert kept[0]["score"] >= kept[1]["score"] >= dropped[-1]["score"]
    alone = await stack.continued({**common, "seed": kept[0]["seed"]})
    assert "score" not in alone["artifacts"][0] or alone["artifacts"][0]["score"] is None
    files = [await api.get(one["artifacts"][0]["url"]) for one in (job, alone)]
    best, plain = (np.asarray(Image.open(io.BytesIO(file.content)), int) for file in files)
    assert np.abs(best - plain).max() <= 2


@pytest.mark.parametrize("stack", ["band"], indirect=True)
async def test_sounds_share_forwards_and_start_from_sounds(stack: StackHarness) -> None:
    """Each has its format, its length and a waveform; a finished one can be changed."""
    api, forms = stack.client, ("wav", "opus")
    common = {"model": "band", "lyrics": "la la", "extra": {"bpm": 90}}
    pairs = zip(("a dog", "a fog"), forms, strict=True)
    jobs = await stack.finished(*({**common, "prompt": prompt, "output_format": form} for prompt, form in pairs))
    assert [job["batching"]["max_jobs"] for job in jobs] == [2, 2]
    for job, form in zip(jobs, forms, strict=True):
        (artifact,) = job["artifacts"]
        assert (artifact["kind"], artifact["duration_s"], artifact["channels"]) == ("audio", 1.0, 2)
        file, still = await api.get(artifact["url"]), await api.get(artifact["thumbnail_url"])
        assert file.headers["content-type"] == artifact["content_type"]
        assert file.headers["content-disposition"].endswith(f'-0.{form}"')
        with av.open(io.BytesIO(file.content)) as sound:
            assert sound.streams.audio[0].rate == artifact["sample_rate"]
            assert sum(frame.samples for frame in sound.decode(audio=0)) >= artifact["sample_rate"]
        assert Image.open(io.BytesIO(still.content)).format == "PNG"
    uploaded = await upload(api, an_audio_file(seconds=2.2))
    changed = await stack.continued({**common, "prompt": "a cover", "audio": uploaded, "strength": 0.5})
    assert (changed["task"], changed["duration_s"], changed["audio"]["duration_s"]) == ("audio_to_audio", 2.2, 2.2)
    assert changed["artifacts"][0]["duration_s"] == 2.2
    again = await stack.continued({**common, "prompt": "a solo", "audio": jobs[1]["id"], "repaint_end_s": 0.5})
    assert (again["task"], again["repaint_start_s"], again["repaint_end_s"]) == ("audio_inpaint", None, 0.5)
