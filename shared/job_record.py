"""The record of a job: its state, and what its run has made and used, as the worker settles it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shared.config.candidates import DroppedCandidate
from shared.job import Frozen, Job, Phase, State


class Thumbnail(Frozen):
    """A stored JPEG of a video's first frame, or of a mesh; of a sound its waveform, as a PNG."""

    key: str
    content_type: str
    bytes: int
    width: int
    height: int


class Artifact(Frozen):
    """A stored image, video, sound or mesh, or latents; `frames` to `channels` are only set for videos and sounds,
    `vertices` and `faces` for meshes. A sound has no sides: they are 0. Those of a mesh are those of its thumbnail.

    One that candidates were dropped for has their scorer's `score` of it.
    One that was sent to its job's destination has a `location`: its key is that in the bucket, or a name for a URL.
    """

    index: int
    kind: Literal["image", "video", "audio", "mesh", "latents"] = "image"
    key: str
    content_type: str
    bytes: int
    width: int
    height: int
    seed: int
    score: Annotated[float | None, Field(exclude_if=lambda score: score is None)] = None
    flagged: bool = False
    frames: int | None = None
    fps: int | None = None
    duration_s: float | None = None
    has_audio: bool | None = None
    sample_rate: Annotated[int | None, Field(exclude_if=lambda rate: rate is None)] = None
    channels: Annotated[int | None, Field(exclude_if=lambda channels: channels is None)] = None
    thumbnail: Thumbnail | None = None
    vertices: Annotated[int | None, Field(exclude_if=lambda count: count is None)] = None
    faces: Annotated[int | None, Field(exclude_if=lambda count: count is None)] = None
    location: Annotated[str | None, Field(exclude_if=lambda location: location is None)] = None


class Failure(Frozen):
    """The error of a job, as shown to its client."""

    code: str
    message: str
    param: str | None = None
    retryable: bool = False


class FieldWarning(Frozen):
    """A field of the request that has no effect, or another one than was sent."""

    param: str = Field(examples=["mask"])
    message: str = Field(examples=["mask: repaints nothing"])


class Progress(Frozen):
    """Completed and total denoising steps over all images of the job."""

    step: int = 0
    total: int = 0

    @property
    def percent(self) -> int:
        return 100 * self.step // self.total if self.total else 0


MAX_ROW_CHANGES = 64
"""Of a job's record: at most 600 bytes of JSON."""


class BatchingStats(Frozen):
    """Batching of a job over its denoiser forwards.

    `max_jobs` is the most jobs in one forward, including this one; `mean_rows` the mean rows of its forwards, before
    guidance doubling. `skipped_steps` counts those of all its images; it is omitted without any, so that older programs
    can read the rest. `rows_by_forward` are the rows of its forwards in order, as `(rows, forwards)`, up to
    `MAX_ROW_CHANGES` of them. `dropped` are the candidates that were not finished, in the order in which they were
    dropped. `solo_reason` is None if the job ever had batch mates.
    """

    forwards: int = 0
    max_jobs: int = 1
    mean_rows: float = 1.0
    skipped_steps: Annotated[int, Field(exclude_if=lambda steps: not steps)] = 0
    rows_by_forward: Annotated[tuple[tuple[int, int], ...], Field(exclude_if=lambda rows: not rows)] = ()
    dropped: Annotated[tuple[DroppedCandidate, ...], Field(exclude_if=lambda dropped: not dropped)] = ()
    solo_reason: str | None = None


class Timings(Frozen):
    """Duration of each phase in milliseconds; None if not reached."""

    queue_ms: int | None = None
    load_ms: int | None = None
    inference_ms: int | None = None
    upload_ms: int | None = None


class DeviceTimes(Frozen):
    """How long the engine worked for a job, in seconds: whole forwards that it took part in, and the code around them.

    `step_s` is the mean of a computed step of its images together, `rest_s` all other work, `run_s` the sum. The least
    ones are an image's share of one forward: the shortest denoising step, and the shortest decode. None without any.
    """

    step_s: float
    rest_s: float
    run_s: float
    least_step_s: float | None = None
    least_rest_s: float | None = None

    def wire(self) -> str:
        """Return the times in milliseconds as the queue's scripts read them."""
        times = (self.step_s, self.rest_s, self.run_s, self.least_step_s, self.least_rest_s)
        return " ".join("-" if seconds is None else f"{1000 * seconds:.6g}" for seconds in times)


class Outcome(Frozen):
    """Terminal state and results with which a worker settles a job.

    `device_seconds` is the job's share of the engine's work in this run; it is charged to the tenant. From
    `device_times` the queue learns how long jobs of its signature take. `resumed_steps` are those of all images that a
    checkpoint has spared.
    """

    state: State
    artifacts: tuple[Artifact, ...] = ()
    error: Failure | None = None
    batching: BatchingStats = BatchingStats()
    timings: Timings = Timings()
    progress: Progress = Progress()
    device_seconds: float = 0.0
    warnings: tuple[FieldWarning, ...] = ()
    device_times: DeviceTimes | None = None
    resumed_steps: int = 0


class JobRecord(Frozen):
    """A job and its state at the time of reading. One that `waits` is queued for later, and not due."""

    job: Job
    state: State
    phase: Phase | None = None
    progress: Progress = Progress()
    attempts: int = 0
    losses: int = 0
    epoch: int = 0
    worker: str | None = None
    cancel_requested: bool = False
    paused_at_ms: int | None = None
    waits: bool = False
    deadline_at_ms: int | None = None
    started_at_ms: int | None = None
    finished_at_ms: int | None = None
    expires_at_ms: int | None = None
    artifacts: tuple[Artifact, ...] = ()
    error: Failure | None = None
    batching: BatchingStats | None = None
    timings: Timings = Timings()
    device_seconds: float | None = None
    resumed_steps: int = 0
    warnings: tuple[FieldWarning, ...] = ()
    event_id: str = "0-0"
