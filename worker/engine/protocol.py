"""What the rest of the worker hands to the engine and hears from it; nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from shared.config.models_file import Catalog, ModelSpec
from shared.config.settings import Settings
from shared.errors import JobError
from shared.job import BatchingStats, Job
from shared.signature import shape

Pixels = npt.NDArray[np.uint8]  # [height, width, 3 or 4] of a picture, [frames, height, width, 3] of a video


@dataclass(frozen=True)
class InputFiles:
    """The files of a job's input pictures."""

    images: tuple[bytes, ...] = ()
    mask: bytes | None = None
    last_image: bytes | None = None

    @property
    def empty(self) -> bool:
        return not self.images and self.mask is None and self.last_image is None


@dataclass(frozen=True)
class Audio:
    """What goes with a video's frames: `samples` [channels, samples] of -1 to 1, `rate` of them a second."""

    samples: npt.NDArray[np.float32]
    rate: int


@dataclass(frozen=True)
class Output:
    """A finished picture, or a video with its sound, if it has any; `flagged` by the model's safety checker."""

    pixels: Pixels
    flagged: bool = False
    sound: Audio | None = None

    @property
    def is_video(self) -> bool:
        return self.pixels.ndim == 4

    @property
    def nbytes(self) -> int:
        return self.pixels.nbytes + (0 if self.sound is None else self.sound.samples.nbytes)


@dataclass(frozen=True)
class EngineRequest:
    """One job handed to the engine, under a key that no other claim of it has.

    `waiting_since_s` is `time.monotonic()` of its arrival in line, None where it stood in none.
    """

    claim_key: str
    job: Job
    spec: ModelSpec
    inputs: InputFiles = InputFiles()
    solo: bool = False
    queued_since_s: float | None = None


@dataclass(frozen=True)
class JobFinished:
    """How a job left the engine. `canceled` is also set for one that was thrown out to be given back."""

    error: JobError | None = None
    canceled: bool = False
    batching: BatchingStats = field(default_factory=BatchingStats)
    load_ms: int | None = None
    inference_ms: int | None = None
    gpu_seconds: float = 0.0


@dataclass(frozen=True)
class ForwardDone:
    """One denoiser forward that succeeded. `rows` counts pictures: guidance's doubling is not in it.

    `padding` counts the copies that filled it up beside them; `claim_key` is that of one of its jobs.
    """

    model: str
    rows: int
    jobs: int
    seconds: float
    device: str
    shape: str
    claim_key: str
    padding: int = 0


@dataclass(frozen=True)
class EngineIncident:
    """What operators count of a model: `amount` is the seconds of a load, the forwards that were repeated."""

    kind: Literal["model_loaded", "model_load_failed", "out_of_memory", "forward_repeated"]
    model: str
    amount: float = 1


@dataclass(frozen=True)
class Activity:
    """What a hang detector needs. `since_s` is `time.monotonic()` of the last sign of life while `busy`: the end of
    a forward or of a picture's own code, or the start of the work.

    `loading` says that only loading a model is under way; `expected_s` is how long the present forward took in
    the past, None if it is the first of its kind. An engine whose thread has died is busy since minus infinity.
    """

    busy: bool
    since_s: float
    loading: bool = False
    expected_s: float | None = None


@dataclass(frozen=True)
class ThreadTime:
    """How the engine's thread has spent its time: with pictures to go on with, and without while a job waited."""

    busy_s: float = 0.0
    idle_while_queued_s: float = 0.0


@dataclass(frozen=True)
class EngineStatus:
    """What an engine tells of itself.

    `models_bytes` is what the models in memory take, with their adapters, of the device's `memory_bytes`.
    `load_seconds` is how long the last load of each model took, from the weights' files to the first job it may serve;
    `unavailable_models` why a model could not be loaded whose last load failed. `device_uuid` is a GPU's name in all of
    its driver's books. `row_limits` is how many images memory holds together, by model and shape, where it ran out.
    """

    device: str
    device_uuid: str | None = None
    memory_bytes: int = 0
    models_bytes: int = 0
    loaded_models: tuple[str, ...] = ()
    load_seconds: Mapping[str, float] = field(default_factory=dict)
    unavailable_models: Mapping[str, str] = field(default_factory=dict)
    row_limits: Mapping[tuple[str, str], int] = field(default_factory=dict)
    activity: Activity = Activity(busy=False, since_s=0.0)
    thread_time: ThreadTime = ThreadTime()


class EngineEvents(Protocol):
    """Hears from the engine, on the engine's thread: it must only hand over, and never block."""

    def loading(self, key: str) -> None: ...

    def progress(self, key: str, step: int, total: int) -> None: ...

    def decoding(self, key: str) -> None: ...

    def preview(self, key: str, index: int, pixels: Pixels) -> None:
        """Take the next preview of picture `index` of the job, smaller than the picture."""

    def picture(self, key: str, index: int, made: Output) -> None:
        """Take result `index` of the job: layers of one picture have consecutive ones."""

    def finished(self, key: str, finished: JobFinished) -> None: ...

    def forward(self, facts: ForwardDone) -> None: ...

    def incident(self, incident: EngineIncident) -> None: ...


class EngineInterface(Protocol):
    """What a worker asks of its engine, on a thread of its own or in a process of its own. Nothing blocks, but
    `warm_up` and `stop`.
    """

    def start(self) -> None: ...

    def warm_up(self) -> None:
        """Load the catalog's models, as far as memory goes; returns when each has come or failed."""

    def stop(self, timeout_s: float) -> None:
        """End after the present forward, throwing out what is unfinished; waits up to `timeout_s`."""

    def submit(self, *requests: EngineRequest) -> None:
        """Take jobs in, which begin together; the listener hears of each from now on, and at last that it finished."""

    def cancel(self, claim_key: str) -> None:
        """Let a job leave at its next step; unknown keys are ignored."""

    def release_all(self) -> None:
        """Throw every unfinished job out; each finishes as canceled."""

    def status(self) -> EngineStatus: ...


EngineFactory: TypeAlias = Callable[[Catalog, EngineEvents, Settings], EngineInterface]


def allowed_rows(standing: EngineStatus, job: Job, most: int) -> int:
    """Return how many pictures like those of `job`, at most `most`, memory lets run together now."""
    return min(most, standing.row_limits.get((job.model, shape_of(job)), most))


def shape_of(job: Job) -> str:
    """Return how large a job's pictures are, as what is learned of them is filed."""
    return shape(job) if job.frames == 1 else f"{shape(job)}x{job.frames}"
