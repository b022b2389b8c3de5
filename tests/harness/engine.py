"""Engine tests: jobs, a recorder of events, an engine with tiny models."""

from __future__ import annotations

import io
import os
import threading
import wave
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from harness import model_pool
from harness.videos import SIZE as VIDEO_SIZE
from harness.videos import a_video_file
from shared.config.catalog import Catalog
from shared.config.model_spec import ModelSpec
from shared.config.request_limits import Defaults, Limits
from shared.config.settings import Settings
from shared.job import InputRef, Job
from shared.tasks import VIDEO_TYPES, OutputFormat, Task
from worker.engine.engine import Engine
from worker.engine.outputs import Audio, Latents, Mesh, Output
from worker.engine.protocol import (
    CandidatesDropped,
    CheckpointTaken,
    EngineEvent,
    EngineRequest,
    ForwardDone,
    InputFiles,
    JobFinished,
    JobPhaseChanged,
    JobProgress,
    OutputReady,
    PreviewReady,
)

DEVICE = os.environ.get("TEST_DEVICE", "cpu")  # of the engines of tests: `TEST_DEVICE=cuda make parity`
SIDE = 64
TIMEOUT_S = 100.0
DIFFUSERS_AND_NUMPY = "ignore:__array_:DeprecationWarning"  # some schedulers, under numpy 2.4
BOTH_TASKS = (Task.TEXT_TO_IMAGE, Task.IMAGE_TO_IMAGE)


def a_spec(source: Path, model: str = "tiny", **fields: Any) -> ModelSpec:
    values: dict[str, Any] = {
        "id": model,
        "source": str(source),
        "tasks": BOTH_TASKS,
        "max_batch": 8,
        "limits": Limits(multiple_of=16, max_images=min(8, fields.get("max_batch", 8))),
        "defaults": Defaults(width=SIDE, height=SIDE, steps=4, guidance_scale=4.0),
    }
    return ModelSpec(**(values | fields))


def a_job(name: str, image_count: int = 1, **fields: Any) -> Job:
    values: dict[str, Any] = {
        "id": name,
        "tenant": "default",
        "created_at_ms": 0,
        "model": "tiny",
        "width": SIDE,
        "height": SIDE,
        "prompt": f"a image of {name}",
        "seed": sum(name.encode()),
        "steps": 4,
        "guidance_scale": 4.0,
        "keep_unmasked": False,  # as plain calls
    }
    if "strength" in fields:
        values["task"] = Task.IMAGE_TO_IMAGE
    if fields.get("task", Task.TEXT_TO_IMAGE).makes_audio:
        values |= {"width": 0, "height": 0, "duration_s": 2.0, "output_format": OutputFormat.WAV}
    job = Job(**(values | fields))
    return job.model_copy(update=input_fields(job, image_count))


def input_fields(job: Job, image_count: int) -> dict[str, Any]:
    """Return the inputs that a job of its task refers to, `image_count` of them for edits, unless it has some."""
    ref = InputRef(id="in_1", key="k", content_type="image/png", bytes=1, width=SIDE, height=SIDE)
    values: dict[str, Any] = {}
    if job.task.takes_image and not job.images:
        values["images"] = (ref,) * image_count
    if job.task.takes_audio and job.audio is None:
        values["audio"] = InputRef(id="in_2", key="k", content_type="audio/wav", bytes=1, width=0, height=0)
    if job.task is Task.INPAINT and job.mask is None:
        values["mask"] = ref
    if job.task.takes_video and job.video is None:
        width, height = VIDEO_SIZE
        frames = (job.frames + 1) // 2 if job.task is Task.EXTEND_VIDEO else job.frames
        shown = {"width": width, "height": height, "frames": frames, "fps": float(job.fps or 1)}
        values["video"] = ref.model_copy(update={"content_type": VIDEO_TYPES[0], **shown})
        values |= {"face_video": values["video"]} if job.task is Task.ANIMATE else {}
    if job.controls and not job.control_images:
        values["control_images"] = (ref,) * len(job.controls)
    if job.task is Task.EDIT and not job.reference_sizes:
        values["reference_sizes"] = ((SIDE, SIDE),) * (len(job.images) or image_count)
    return values


def an_image_file(shade: int = 90, size: tuple[int, int] = (96, 80)) -> bytes:
    """A PNG of a gradient, in another size than the jobs'."""
    image = Image.radial_gradient("L").resize(size).convert("RGB").point(lambda value: (value + shade) % 256)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def a_mask_file(size: tuple[int, int] = (96, 80)) -> bytes:
    """A PNG whose right half is white, which means repainted."""
    mask = Image.new("L", size)
    mask.paste(255, (size[0] // 2, 0, *size))
    file = io.BytesIO()
    mask.save(file, "PNG")
    return file.getvalue()


def an_audio_file(pitch: float = 220.0, seconds: float = 1.5, rate: int = 8000) -> bytes:
    """A WAV file of a rising tone in both channels, at the rate of the tiny models, and shorter than their sounds."""
    at = np.arange(int(seconds * rate)) / rate
    tone = (9000 * np.sin(2 * np.pi * (pitch + 60 * at) * at)).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(2)
        sound.setsampwidth(2)
        sound.setframerate(rate)
        sound.writeframes(np.repeat(tone, 2).tobytes())
    return file.getvalue()


def _faces_file(job: Job) -> bytes:
    ref = job.face_video
    return a_video_file(ref.frames if ref is not None else 1, job.fps or 1, shade=(job.seed + 37) % 100)


def input_files(job: Job) -> InputFiles:
    """The input files of a job: all differ, and equal jobs have equal files."""
    return InputFiles(
        images=tuple(an_image_file(shade=(job.seed + 31 * at) % 100) for at in range(len(job.images))),
        mask=None if job.mask is None else a_mask_file(),
        last_image=None if job.last_image is None else an_image_file(shade=(job.seed + 50) % 100),
        controls=tuple(an_image_file(shade=(job.seed + 70 + 13 * at) % 100) for at in range(len(job.control_images))),
        video=None if job.video is None else a_video_file(job.video.frames, job.fps or 1, shade=(job.seed + 19) % 100),
        face_video=None if job.face_video is None else _faces_file(job),
        audio=None if job.audio is None else an_audio_file(pitch=200.0 + job.seed % 100),
    )


@dataclass
class EventRecorder:
    """The engine's `EngineEvents`, which keeps all events; `log` has a short form of those of jobs."""

    log: list[tuple[Any, ...]] = field(default_factory=list)
    images: dict[tuple[str, int], np.ndarray] = field(default_factory=dict)
    outputs: dict[tuple[str, int], Output] = field(default_factory=dict)
    latents: dict[tuple[str, int], Latents] = field(default_factory=dict)
    sounds: dict[tuple[str, int], Audio] = field(default_factory=dict)
    meshes: dict[tuple[str, int], Mesh] = field(default_factory=dict)
    previews: list[np.ndarray] = field(default_factory=list)
    finished: dict[str, JobFinished] = field(default_factory=dict)
    forwards: list[ForwardDone] = field(default_factory=list)
    model_events: list[EngineEvent] = field(default_factory=list)
    checkpoints: list[CheckpointTaken] = field(default_factory=list)
    change: threading.Condition = field(default_factory=threading.Condition)

    def on_event(self, event: EngineEvent) -> None:
        match event:
            case JobPhaseChanged(key, phase):
                self.log.append((phase.value, key))
            case JobProgress(key, step, total):
                self.log.append(("progress", key, step, total))
            case CandidatesDropped(key, running):
                self.log.append(("dropped", key, running))
            case PreviewReady(key, index, pixels):
                self.log.append(("preview", key, index))
                self.previews.append(pixels)
            case OutputReady(key, index, output):
                assert (key, index) not in self.images
                if isinstance(output, Latents):
                    self.latents[key, index] = output
                    return
                if isinstance(output, Audio):
                    self.log.append(("output", key, index, False))
                    self.images[key, index] = output.samples
                    self.sounds[key, index] = output
                    return
                if isinstance(output, Mesh):
                    self.meshes[key, index] = output
                    return
                self.log.append(("output", key, index, output.flagged))
                self.images[key, index] = output.pixels
                self.outputs[key, index] = output
            case JobFinished(key):
                assert key not in self.finished
                with self.change:
                    self.finished[key] = event
                    self.change.notify_all()
            case CheckpointTaken():
                self.checkpoints.append(event)
            case ForwardDone():
                self.forwards.append(event)
            case _:
                self.model_events.append(event)

    @property
    def rows(self) -> list[int]:
        return [forward.rows for forward in self.forwards]

    def wait_for(self, keys: Sequence[str]) -> None:
        with self.change:
            done = self.change.wait_for(lambda: set(keys) <= set(self.finished), TIMEOUT_S)
        assert done, f"not finished in time: {sorted(set(keys) - set(self.finished))}"


class EngineHarness:
    """An engine, its event recorder and its models.

    In tests that share models, one of another factory loads and checks its own; any one those named `fresh`.
    """

    def __init__(
        self,
        *specs: ModelSpec,
        recorder: EventRecorder | None = None,
        factory: Callable[..., Any] = Engine,
        fresh: Container[str] = (),
        **settings: Any,
    ) -> None:
        self._shared = [spec for spec in specs if factory is Engine and spec.id not in fresh]
        self.recorder = recorder or EventRecorder()
        self.specs = {spec.id: spec for spec in specs}
        self.engine = factory(
            Catalog(specs),
            self.recorder,
            Settings(**{"device": DEVICE, "torch_threads": 1, "cpu_memory_bytes": 0, **settings}),
        )

    def submit(
        self,
        *jobs: Job,
        solo: Sequence[str] = (),
        image: bytes | None = None,
        inputs: InputFiles | None = None,
        **request: Any,
    ) -> None:
        """Submit jobs, which start together, with `inputs`, `image`, or images generated from their seeds as inputs.

        `request` are further fields of their requests.
        """
        self.engine.submit(
            *(
                EngineRequest(
                    job.id,
                    job,
                    self.specs[job.model],
                    inputs or (input_files(job) if image is None else InputFiles(images=(image,))),
                    job.id in solo,
                    **request,
                )
                for job in jobs
            )
        )

    def submit_prepared(self, *jobs: Job) -> None:
        """Submit jobs and wait until their input images are decoded, so that the engine admits them next."""
        self.submit(*jobs)
        self.engine._input_decoder._small.submit(int).result(TIMEOUT_S)

    def run(self, *jobs: Job, solo: Sequence[str] = (), **request: Any) -> EventRecorder:
        """Submit jobs, which start together, and wait until they have finished."""
        self.submit(*jobs, solo=solo, **request)
        with self.started():
            self.recorder.wait_for([job.id for job in jobs])
        return self.recorder

    @contextmanager
    def started(self) -> Iterator[Any]:
        with model_pool.lent_to(self.engine, self._shared):
            self.engine.start()
            try:
                yield self.engine
            finally:
                self.engine.stop(TIMEOUT_S)
