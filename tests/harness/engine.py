"""What the engine's tests share: jobs, a listener that keeps what it hears, an engine on tiny models."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from shared.config.models_file import Catalog, Defaults, Limits, ModelSpec
from shared.config.settings import Settings
from shared.job import InputRef, Job, Task
from worker.engine import (
    EngineEvent,
    EngineRequest,
    ForwardDone,
    InputFiles,
    JobDecoding,
    JobFinished,
    JobLoading,
    JobProgress,
    Output,
    OutputReady,
    PreviewReady,
)
from worker.engine.engine import Engine

SIDE = 64
TIMEOUT_S = 60.0
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
        "prompt": f"a picture of {name}",
        "seed": sum(name.encode()),
        "steps": 4,
        "guidance_scale": 4.0,
    }
    if "strength" in fields:
        values["task"] = Task.IMAGE_TO_IMAGE
    job = Job(**(values | fields))
    return job.model_copy(update=input_fields(job, image_count))


def input_fields(job: Job, image_count: int) -> dict[str, Any]:
    """Return the inputs that a job of its task refers to, `image_count` of them for edits, unless it has some."""
    ref = InputRef(id="in_1", key="k", content_type="image/png", bytes=1, width=SIDE, height=SIDE)
    values: dict[str, Any] = {}
    if job.task not in (Task.TEXT_TO_IMAGE, Task.TEXT_TO_VIDEO) and not job.images:
        values["images"] = (ref,) * image_count
    if job.task is Task.INPAINT and job.mask is None:
        values["mask"] = ref
    if job.task is Task.EDIT and not job.reference_sizes:
        values["reference_sizes"] = ((SIDE, SIDE),) * (len(job.images) or image_count)
    return values


def a_picture_file(shade: int = 90, size: tuple[int, int] = (96, 80)) -> bytes:
    """A PNG with something to see in it, not of the size that jobs ask for."""
    picture = Image.radial_gradient("L").resize(size).convert("RGB").point(lambda value: (value + shade) % 256)
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def a_mask_file(size: tuple[int, int] = (96, 80)) -> bytes:
    """A PNG whose right half is white: it is to be repainted."""
    mask = Image.new("L", size)
    mask.paste(255, (size[0] // 2, 0, *size))
    file = io.BytesIO()
    mask.save(file, "PNG")
    return file.getvalue()


def input_files(job: Job) -> InputFiles:
    """The files of the pictures that a job refers to: each differs, and the same job has the same ones."""
    return InputFiles(
        images=tuple(a_picture_file(shade=(job.seed + 31 * at) % 100) for at in range(len(job.images))),
        mask=None if job.mask is None else a_mask_file(),
        last_image=None if job.last_image is None else a_picture_file(shade=(job.seed + 50) % 100),
    )


@dataclass
class Recorder:
    """A listener that keeps everything it hears, on the engine's thread."""

    heard: list[tuple[Any, ...]] = field(default_factory=list)
    pictures: dict[tuple[str, int], np.ndarray] = field(default_factory=dict)
    made: dict[tuple[str, int], Output] = field(default_factory=dict)
    previews: list[np.ndarray] = field(default_factory=list)
    ended: dict[str, JobFinished] = field(default_factory=dict)
    facts: list[ForwardDone] = field(default_factory=list)
    model_events: list[EngineEvent] = field(default_factory=list)
    change: threading.Condition = field(default_factory=threading.Condition)

    def on_event(self, event: EngineEvent) -> None:
        match event:
            case JobLoading(key):
                self.heard.append(("loading", key))
            case JobProgress(key, step, total):
                self.heard.append(("progress", key, step, total))
            case JobDecoding(key):
                self.heard.append(("decoding", key))
            case PreviewReady(key, index, pixels):
                self.heard.append(("preview", key, index))
                self.previews.append(pixels)
            case OutputReady(key, index, output):
                assert (key, index) not in self.pictures
                self.heard.append(("picture", key, index, output.flagged))
                self.pictures[key, index] = output.pixels
                self.made[key, index] = output
            case JobFinished(key):
                assert key not in self.ended
                with self.change:
                    self.ended[key] = event
                    self.change.notify_all()
            case ForwardDone():
                self.facts.append(event)
            case _:
                self.model_events.append(event)

    @property
    def rows(self) -> list[int]:
        return [facts.rows for facts in self.facts]

    def wait_for(self, keys: Sequence[str]) -> None:
        with self.change:
            done = self.change.wait_for(lambda: set(keys) <= set(self.ended), TIMEOUT_S)
        assert done, f"not finished in time: {sorted(set(keys) - set(self.ended))}"


class Room:
    """An engine, its listener and its models."""

    def __init__(
        self,
        *specs: ModelSpec,
        recorder: Recorder | None = None,
        make: Callable[..., Any] = Engine,
        **settings: Any,
    ) -> None:
        self.recorder = recorder or Recorder()
        self.specs = {spec.id: spec for spec in specs}
        told = Settings(**{"device": "cpu", "torch_threads": 1, **settings})
        self.engine = make(Catalog(specs), self.recorder, told)

    def seat(
        self, *jobs: Job, solo: Sequence[str] = (), image: bytes | None = None, waited_s: float | None = None
    ) -> None:
        """Seat jobs, which begin together; their input pictures are made from their seeds, but for `image`, if any."""
        since_s = None if waited_s is None else time.monotonic() - waited_s
        self.engine.submit(
            *(
                EngineRequest(
                    job.id,
                    job,
                    self.specs[job.model],
                    input_files(job) if image is None else InputFiles(images=(image,)),
                    job.id in solo,
                    since_s,
                )
                for job in jobs
            )
        )

    def seat_now(self, *jobs: Job) -> None:
        """Seat jobs and wait until their input pictures are decoded: the engine's next round takes them in."""
        self.seat(*jobs)
        self.engine._input_executor.submit(int).result(TIMEOUT_S)

    def run(self, *jobs: Job, solo: Sequence[str] = ()) -> Recorder:
        """Seat all jobs, which begin together, and wait for them."""
        self.seat(*jobs, solo=solo)
        with self.started():
            self.recorder.wait_for([job.id for job in jobs])
        return self.recorder

    @contextmanager
    def started(self) -> Iterator[Any]:
        self.engine.start()
        try:
            yield self.engine
        finally:
            self.engine.stop(TIMEOUT_S)
