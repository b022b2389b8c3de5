"""Every field of a request reaches the job, the response and the pipeline's call, or its row says why not."""

from __future__ import annotations

import io
import wave
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import torch
from diffusers import EulerDiscreteScheduler
from harness.http_server import ROOT, png, serving
from harness.request_fields import COLOURS, ENDED_JOB, FACES, MODELS, PITCHES, ROWS, VIDEO, fields
from harness.videos import a_plain_video
from PIL import Image, ImageColor

from shared.config.destinations import OutputBucket
from shared.job import Job
from shared.queue import Queue
from shared.storage.folder import FolderStorage
from shared.tasks import Medium, Task
from worker.engine.pipelines.call_arguments import arguments_for
from worker.engine.pipelines.input_images import decode_inputs
from worker.engine.protocol import InputFiles


class Painter:
    """A pipeline with the parameters of all image pipelines."""

    scheduler = EulerDiscreteScheduler()

    def __call__(  # noqa: PLR0913 - as pipelines have
        self,
        prompt: str,
        *,
        negative_prompt: str | None = None,
        image: Any = None,
        mask_image: Any = None,
        strength: float = 0.3,
        width: int | None = None,
        height: int | None = None,
        num_inference_steps: int = 50,
        guidance_scale: float = 5.0,
        generator: Any = None,
        layers: int = 1,
        prompt_2: str | None = None,
        clip_skip: int | None = None,
        max_sequence_length: int = 512,
        true_cfg_scale: float = 1.0,
        guidance_rescale: float = 0.0,
        denoising_end: float | None = None,
        denoising_start: float | None = None,
        timesteps: Any = None,
        sigmas: Any = None,
        control_image: Any = None,
        controlnet_conditioning_scale: Any = 1.0,
        control_guidance_start: Any = 0.0,
        control_guidance_end: Any = 1.0,
    ) -> None: ...


class Film:
    """A pipeline with the parameters of all video pipelines."""

    def __call__(  # noqa: PLR0913 - as pipelines have
        self,
        prompt: str,
        *,
        image: Any = None,
        last_image: Any = None,
        video: Any = None,
        guidance_scale: float = 5.0,
        guidance_scale_2: float | None = None,
        num_frames: int = 1,
        frame_rate: float = 8.0,
    ) -> None: ...


class Dancer:
    """A pipeline that animates an image by poses and faces."""

    def __call__(self, prompt: str, *, image: Any, pose_video: Any, face_video: Any) -> None: ...


class Band:
    """A pipeline with the parameters of all pipelines of sounds."""

    vae = SimpleNamespace(config=SimpleNamespace(sampling_rate=8000, audio_channels=2))

    def __call__(
        self,
        prompt: str,
        *,
        lyrics: str = "",
        audio_duration: float = 60.0,
        src_audio: Any = None,
        repainting_start: float | None = None,
        repainting_end: float | None = None,
    ) -> None: ...


def test_each_field_has_a_row() -> None:
    assert set(fields()) == ROWS.keys()


def test_a_reason_names_files_that_exist() -> None:
    texts = [text for row in ROWS.values() for text in (row.job, row.response, row.call) if isinstance(text, str)]
    files = [word for text in texts for word in text.split() if word.startswith("tests/")]
    assert [file for file in files if not (ROOT / file).is_file()] == []


@dataclass(frozen=True)
class Service:
    """The API, and what a worker makes of its jobs."""

    api: httpx.AsyncClient
    queue: Queue
    storage: FolderStorage
    inputs: dict[str, str]

    async def results(self, body: Mapping[str, Any]) -> tuple[Any, Any, Any, Any]:
        """Return the job of a request, the responses to it and to a read, and the pipeline's call."""
        answer = await self.api.post(
            "/v1/jobs", json=self._with_ids({"model": "painter", "prompt": "x", "seed": 7, **body})
        )
        assert answer.status_code == 202, answer.text
        response = answer.json()
        record = await self.queue.jobs.get(response["id"])
        assert record is not None
        read = (await self.api.get(f"/v1/jobs/{response['id']}")).json()
        job, call = record.job.model_dump(mode="json", by_alias=False), await self._call(record.job)
        return self._with_colours(job), self._with_colours(response), self._with_colours(read), self._with_colours(call)

    async def _call(self, job: Job) -> dict[str, Any]:
        data = {name: await self.storage.read(ref.key) for name, ref in job.inputs.items()}
        files = InputFiles(
            images=tuple(data[name] for name in data if name.startswith("image")),
            mask=data.get("mask"),
            last_image=data.get("last_image"),
            controls=tuple(data[name] for name in data if name.startswith("controls.")),
            video=data.get("video"),
            face_video=data.get("face_video"),
            audio=data.get("audio"),
        )
        of_medium: dict[Medium, Any] = {Medium.VIDEO: Film, Medium.AUDIO: Band, Medium.IMAGE: Painter}
        pipeline = Dancer if job.task is Task.ANIMATE else of_medium[job.task.medium]
        return arguments_for(pipeline(), job, 0, decode_inputs(job, files))

    def _with_ids(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: self._with_ids(one) for name, one in value.items()}
        if isinstance(value, list):
            return [self._with_ids(one) for one in value]
        return self.inputs.get(value, value) if isinstance(value, str) else value

    def _with_colours(self, value: Any) -> Any:
        if isinstance(value, Image.Image):
            pixel = np.array(value.convert("RGB"))[9, 9].astype(int)  # of a video nearly that
            return next(one for one in (*COLOURS, VIDEO, FACES) if np.abs(pixel - ImageColor.getrgb(one)).max() < 4)
        if isinstance(value, torch.Tensor):
            highest = float(value.max())
            return next(name for name, peak in PITCHES.items() if abs(highest - peak) < 0.05)
        if isinstance(value, torch.Generator):
            return value.initial_seed()
        if isinstance(value, dict):
            colours = {input_id: colour for colour, input_id in self.inputs.items()}
            return colours.get(value.get("id", "")) or {name: self._with_colours(one) for name, one in value.items()}
        return [self._with_colours(one) for one in value] if isinstance(value, list | tuple) else value


def a_tone(peak: float) -> bytes:
    """Return a second of a WAV file with samples of up to `peak`."""
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(8000)
        sound.writeframes((32767 * peak * np.sin(np.arange(8000) / 5)).astype("<i2").tobytes())
    return file.getvalue()


def has(made: Any, expected: Any) -> bool:
    """Return whether a value is the expected one, or of its type; of an object, whether its fields are."""
    if isinstance(expected, dict):
        return isinstance(made, dict) and all(has(made.get(name), value) for name, value in expected.items())
    if isinstance(expected, list):
        return isinstance(made, list) and len(made) == len(expected) and all(map(has, made, expected))
    return isinstance(made, expected) if isinstance(expected, type) else bool(made == expected)


async def test_each_field_reaches_the_job_the_response_and_the_call(fake_queue: Queue, tmp_path: Path) -> None:
    """A value that the request without the field leads to as well proves nothing."""
    models, wrong = tmp_path / "models.toml", {}
    models.write_text(MODELS)
    storage = FolderStorage(tmp_path / "storage", timeout_s=10)
    async with serving(fake_queue, tmp_path, models=models, output_buckets=(OutputBucket("renders"),)) as api:
        inputs = {}
        for colour in COLOURS:
            upload = await api.post("/v1/inputs", files={"file": ("a.png", png(colour=colour))})
            inputs[colour] = upload.json()["id"]
        for name, peak in PITCHES.items():
            upload = await api.post("/v1/inputs", files={"file": ("a.wav", a_tone(peak))})
            inputs[name] = upload.json()["id"]
        for colour in (VIDEO, FACES):
            upload = await api.post("/v1/inputs", files={"file": ("a.mp4", a_plain_video(colour))})
            inputs[colour] = upload.json()["id"]
        service = Service(api, fake_queue, storage, inputs)
        ended = {"state": "succeeded", "tenant": "default"}
        await fake_queue.client.redis.hset(fake_queue.client.redis_keys.job(ENDED_JOB), mapping=ended)
        await fake_queue.client.redis.expire(fake_queue.client.redis_keys.job(ENDED_JOB), 600)
        for name, row in ROWS.items():
            made, without = [await service.results(body) for body in ({**row.base, **row.sent}, row.base)]
            places = ("job", row.job), ("response", row.response), ("read", row.response), ("call", row.call)
            for (place, expected), value, before in zip(places, made, without, strict=True):
                if isinstance(expected, str):
                    continue
                if not expected or not has(value, expected) or has(before, expected):
                    wrong[f"{name}: {place}"] = {one: (value.get(one), before.get(one)) for one in expected}
    assert wrong == {}
