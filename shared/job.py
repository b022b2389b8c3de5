"""A job, and what is known of it: the words that every part of fusequeue speaks.

A `Job` is frozen: the API resolves every default (the seed too) once, and nothing changes it afterwards.
What happens to it is kept beside it in a `JobRecord`.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION = 2
"""Version of the queue's keys and fields in Redis; a program refuses to start on any other."""

NEWEST_JOB = 3
"""Latest wire form of a job. A job is written in the earliest form that can express it; workers release newer jobs."""


class Sharing(StrEnum):
    """Whether jobs must agree on a field to share a fused forward."""

    SHARED = "shared"
    PER_JOB = "per_job"


SHARED = Sharing.SHARED
PER_JOB = Sharing.PER_JOB


class State(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELED = "canceled"
    EXPIRED = "expired"

    @property
    def terminal(self) -> bool:
        return self not in (State.QUEUED, State.RUNNING)


class Phase(StrEnum):
    """What a running job is doing."""

    LOADING = "loading"
    DENOISING = "denoising"
    DECODING = "decoding"
    UPLOADING = "uploading"


class Priority(StrEnum):
    """Lanes in the order in which they are served."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BULK = "bulk"


class Task(StrEnum):
    """What a model makes of what. A picture with a strength is noised; one to edit is looked at, and stays as it is."""

    TEXT_TO_IMAGE = "text_to_image"
    IMAGE_TO_IMAGE = "image_to_image"
    INPAINT = "inpaint"
    EDIT = "edit"
    TEXT_TO_VIDEO = "text_to_video"
    IMAGE_TO_VIDEO = "image_to_video"

    @property
    def makes_video(self) -> bool:
        return self in (Task.TEXT_TO_VIDEO, Task.IMAGE_TO_VIDEO)

    @property
    def has_strength(self) -> bool:
        return self in (Task.IMAGE_TO_IMAGE, Task.INPAINT)


class OutputFormat(StrEnum):
    PNG = "png"
    JPEG = "jpeg"
    WEBP = "webp"
    MP4 = "mp4"

    @property
    def content_type(self) -> str:
        return f"{'video' if self is OutputFormat.MP4 else 'image'}/{self.value}"

    @property
    def of_previews(self) -> OutputFormat:
        """What the previews of such a picture are: PNG would be many times as large."""
        return OutputFormat.JPEG if self is OutputFormat.JPEG else OutputFormat.WEBP


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Webhook(_Frozen):
    """Where a job's client is told of its changes of state; `states` are those it asked for.

    Where `version` is set, it is told in the form of Replicate's predictions, of which this is the model's version. A
    job without is written as before there was such a field.
    """

    url: str
    states: tuple[State, ...]
    version: Annotated[str | None, Field(exclude_if=lambda version: version is None)] = None


class InputRef(_Frozen):
    """A picture the job starts from: stored already, validated, known by its content."""

    id: str
    key: str
    content_type: str
    bytes: int
    width: int
    height: int


class Adapter(_Frozen):
    """A LoRA of the model's allow-list and the weight it is mixed in with."""

    id: str
    scale: float = 1.0


class Job(_Frozen):
    """What a client asked for, with nothing left to decide.

    Every field is marked with its `Sharing`. An unmarked field counts as shared: a forgotten mark costs
    speed, never a wrong picture. Sizes are in pixels, times in milliseconds since the epoch. `mixed_fields` names the
    shared fields that its model's forward can mix all the same: the signature leaves them out.

    `images` are those of the task: the one to start from, or those to edit. `reference_sizes` are the sizes (width,
    height) that pictures to edit are brought to, as they become tokens of the forward; empty for all other tasks.
    `layers` is the number of pictures that each of the `n` results consists of, 0 where the model makes single ones.
    """

    schema_version: Annotated[Literal[3], PER_JOB] = 3
    id: Annotated[str, PER_JOB]
    tenant: Annotated[str, PER_JOB]
    created_at_ms: Annotated[int, PER_JOB]
    priority: Annotated[Priority, PER_JOB] = Priority.STANDARD
    deadline_at_ms: Annotated[int | None, PER_JOB] = None
    metadata: Annotated[dict[str, str], PER_JOB] = Field(default_factory=dict)
    batch_id: Annotated[str | None, PER_JOB] = None
    webhook: Annotated[Webhook | None, PER_JOB] = None

    model: Annotated[str, SHARED]
    width: Annotated[int, SHARED]
    height: Annotated[int, SHARED]
    frames: Annotated[int, SHARED] = 1
    fps: Annotated[int | None, SHARED] = None  # positions along time are in seconds where sound goes with the frames
    layers: Annotated[int, SHARED] = 0
    reference_sizes: Annotated[tuple[tuple[int, int], ...], SHARED] = ()
    adapters: Annotated[tuple[Adapter, ...], SHARED] = ()
    mixed_fields: Annotated[tuple[str, ...], SHARED] = ()

    task: Annotated[Task, PER_JOB] = Task.TEXT_TO_IMAGE
    prompt: Annotated[str, PER_JOB]
    negative_prompt: Annotated[str, PER_JOB] = ""
    n: Annotated[int, PER_JOB] = 1
    seed: Annotated[int, PER_JOB]
    steps: Annotated[int, PER_JOB]
    guidance_scale: Annotated[float, PER_JOB]
    guidance_scale_2: Annotated[float | None, PER_JOB] = None
    scheduler: Annotated[str | None, PER_JOB] = None
    strength: Annotated[float | None, PER_JOB] = None
    images: Annotated[tuple[InputRef, ...], PER_JOB] = ()
    mask: Annotated[InputRef | None, PER_JOB] = None
    last_image: Annotated[InputRef | None, PER_JOB] = None
    reproducible: Annotated[bool, PER_JOB] = False
    output_format: Annotated[OutputFormat, PER_JOB] = OutputFormat.PNG
    output_quality: Annotated[int, PER_JOB] = 90
    embed_parameters: Annotated[bool, PER_JOB] = False
    previews: Annotated[int, PER_JOB] = 0  # of each picture on its way, for whoever waits for it

    @property
    def slots(self) -> int:
        """Rows of the job in a fused forward, one per image (guidance doubles them)."""
        return self.n

    def seed_of(self, index: int) -> int:
        """Return the seed that result `index` is made with: the layers of one picture have the same."""
        return self.seed + index // max(1, self.layers)

    @property
    def inputs(self) -> dict[str, InputRef]:
        """The stored pictures that the job needs, by the name of the request's field."""
        several = len(self.images) > 1
        named = {f"images.{at}" if several else "image": ref for at, ref in enumerate(self.images)}
        more = {"mask": self.mask, "last_image": self.last_image}
        return named | {name: ref for name, ref in more.items() if ref is not None}


def sharing(name: str) -> Sharing:
    """Return how the `Job` field called `name` is marked; an unmarked one is shared."""
    for mark in Job.model_fields[name].metadata:
        if isinstance(mark, Sharing):
            return mark
    return SHARED


class Thumbnail(_Frozen):
    """A still that stands for a video: its first frame, as a JPEG in storage."""

    key: str
    content_type: str
    bytes: int
    width: int
    height: int


class Artifact(_Frozen):
    """One finished picture or video in storage; the fields from `frames` on are a video's alone."""

    index: int
    kind: Literal["image", "video"] = "image"
    key: str
    content_type: str
    bytes: int
    width: int
    height: int
    seed: int
    flagged: bool = False
    frames: int | None = None
    fps: int | None = None
    duration_s: float | None = None
    has_audio: bool | None = None
    thumbnail: Thumbnail | None = None


class Failure(_Frozen):
    """Why a job did not succeed, as its client is told."""

    code: str
    message: str
    param: str | None = None
    retryable: bool = False


class Progress(_Frozen):
    """Denoising steps done of those to do, over all of the job's pictures."""

    step: int = 0
    total: int = 0

    @property
    def percent(self) -> int:
        return 100 * self.step // self.total if self.total else 0


class BatchingStats(_Frozen):
    """How much company a job had, counted over its denoiser forwards.

    `max_jobs` is the largest number of jobs in one forward, this one included; `mean_rows` the mean rows a
    forward, guidance's doubling not counted. `solo_reason` says why it never had company, None if it had.
    """

    forwards: int = 0
    max_jobs: int = 1
    mean_rows: float = 1.0
    solo_reason: str | None = None


class Timings(_Frozen):
    """Where the time went, in milliseconds; None means not reached."""

    queue_ms: int | None = None
    load_ms: int | None = None
    inference_ms: int | None = None
    upload_ms: int | None = None


class Outcome(_Frozen):
    """What a worker settles a job with: a terminal state and all that belongs to it.

    `gpu_seconds` is the job's share of the forwards it took part in: the tenant is charged with it.
    """

    state: State
    artifacts: tuple[Artifact, ...] = ()
    error: Failure | None = None
    batching: BatchingStats = BatchingStats()
    timings: Timings = Timings()
    progress: Progress = Progress()
    gpu_seconds: float = 0.0


class JobRecord(_Frozen):
    """A job and everything known of it at the moment of reading."""

    job: Job
    state: State
    phase: Phase | None = None
    progress: Progress = Progress()
    attempts: int = 0
    losses: int = 0
    epoch: int = 0
    worker: str | None = None
    cancel_requested: bool = False
    started_at_ms: int | None = None
    finished_at_ms: int | None = None
    expires_at_ms: int | None = None
    artifacts: tuple[Artifact, ...] = ()
    error: Failure | None = None
    batching: BatchingStats | None = None
    timings: Timings = Timings()
    event_id: str = "0-0"


def encode(job: Job) -> str:
    """Return the job's wire form, JSON with its schema version."""
    return job.model_dump_json()


def is_newer(wire: str | bytes) -> bool:
    """Tell whether a wire form that `decode` refuses is of a later version than this program knows."""
    try:
        version = json.loads(wire).get("schema_version")
    except (ValueError, AttributeError):
        return False
    return isinstance(version, int) and version > NEWEST_JOB


def decode(wire: str | bytes) -> Job:
    """Read a job's wire form; a `pydantic.ValidationError` (a ValueError) means it is not one of ours."""
    return Job.model_validate_json(wire)
