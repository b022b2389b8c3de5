"""Jobs and their records.

A `Job` is immutable: the API resolves all defaults, including the seed. A `JobRecord` holds its changing state.
Until it is claimed, a job can be replaced by one with another priority or time limit.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shared.artifact_ref import ArtifactRef
from shared.config.adapters import Adapter
from shared.config.candidates import DroppedCandidate
from shared.config.controls import Control
from shared.config.destinations import Destination
from shared.config.step_schedules import computed_steps
from shared.job_fields import (
    LATENTS_TYPE,
    MAY_DIFFER,
    MUST_MATCH,
    PARTS,
    VIDEO_TYPES,
    CallFields,
    ChosenFields,
    Matching,
    PipelineFields,
    ServiceFields,
)
from shared.runtime.tracing import TraceContext

QUEUE_SCHEMA = 2
"""Version of the queue's keys and fields in Redis; a program refuses to start on any other."""

JOB_FORM = 3
"""Wire form of a job, its `schema_version`: the latest that this program reads. Workers release jobs of a later one.

Fields at their default are not written, so that older programs, which refuse fields that they do not know, can read
jobs without the new ones. Another default for a field raises the form. `tests/unit/shared/wire_forms.json` has each
form as it was recorded.
"""


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
    """Phase of a running job."""

    LOADING = "loading"
    DENOISING = "denoising"
    DECODING = "decoding"
    UPLOADING = "uploading"


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_by_name=True, serialize_by_alias=True)


class Webhook(_Frozen):
    """A webhook of one job, sent on the given `states`.

    With `version`, a model version, it is sent as a Replicate prediction.
    """

    url: str
    states: tuple[State, ...]
    version: str | None = None


class InputRef(_Frozen):
    """A validated and stored input image or video, or latents, of which the sides are their own; or a sound, without
    sides.

    Its id is derived from its content. Videos have `frames`, and `fps`, their mean rate, and maybe `hidden_frames`,
    which are decoded and not shown; these are omitted without any, so that older programs can read the rest.

    An artifact of a job that had not ended has a `source` instead of an id and a key, and no bytes; the rest is what it
    will be. A worker that claims the job reads it then.
    """

    id: str
    key: str
    content_type: str
    bytes: int
    width: int
    height: int
    frames: Annotated[int, Field(exclude_if=lambda frames: not frames)] = 0
    fps: Annotated[float | None, Field(exclude_if=lambda fps: fps is None)] = None
    hidden_frames: Annotated[int, Field(exclude_if=lambda frames: not frames)] = 0
    duration_s: Annotated[float | None, Field(exclude_if=lambda duration_s: duration_s is None)] = None
    source: Annotated[ArtifactRef | None, Field(exclude_if=lambda source: source is None)] = None

    @property
    def is_latents(self) -> bool:
        return self.content_type == LATENTS_TYPE

    @property
    def is_video(self) -> bool:
        return self.content_type in VIDEO_TYPES

    @property
    def is_audio(self) -> bool:
        return self.content_type.startswith("audio/")

    @property
    def kind(self) -> Literal["image", "video", "audio", "latents"]:
        if self.is_audio:
            return "audio"
        return "video" if self.is_video else "latents" if self.is_latents else "image"


class Job(ServiceFields, CallFields, ChosenFields, PipelineFields, _Frozen):
    """A validated request with all defaults resolved; `created_at_ms` is in ms since the epoch.

    Every field is marked: it must match in all jobs of a signature, or may differ. An unmarked field must match: a
    forgotten mark costs speed but not correctness. The fields that `mixed_fields` names may differ in a forward of the
    model; the signature omits them.

    `images` are the image to start from or those to edit, `video` the one to change or to follow, and `face_video` has
    the faces to follow with it. `reference_sizes` are the (width, height) that images to edit are resized to, empty for
    other tasks. `control_images` are the images of `controls`, in their order.
    `time_limit_ms` counts from the job's queueing, because clocks of two machines differ; Redis sets the deadline. That
    of a job for later counts from `not_before_ms`.
    `trace` is the span of its submission, if traces are on. `previews` are those of each image, for clients that wait.
    """

    schema_version: Annotated[Literal[3], MAY_DIFFER] = 3
    id: Annotated[str, MAY_DIFFER]
    tenant: Annotated[str, MAY_DIFFER]
    created_at_ms: Annotated[int, MAY_DIFFER]
    time_limit_ms: Annotated[int | None, MAY_DIFFER, Field(alias="deadline_ms")] = None  # its name in form 3
    not_before_ms: Annotated[int | None, MAY_DIFFER] = None
    webhook: Annotated[Webhook | None, MAY_DIFFER] = None
    output: Annotated[Destination | None, MAY_DIFFER] = None
    trace: Annotated[TraceContext | None, MAY_DIFFER] = None
    reference_sizes: Annotated[tuple[tuple[int, int], ...], MUST_MATCH] = ()
    adapters: Annotated[tuple[Adapter, ...], MUST_MATCH] = ()
    control_ids: Annotated[tuple[str, ...], MUST_MATCH] = ()
    mixed_fields: Annotated[tuple[str, ...], MUST_MATCH] = ()
    images: Annotated[tuple[InputRef, ...], MAY_DIFFER] = ()
    mask: Annotated[InputRef | None, MAY_DIFFER] = None
    last_image: Annotated[InputRef | None, MAY_DIFFER] = None
    video: Annotated[InputRef | None, MAY_DIFFER] = None
    face_video: Annotated[InputRef | None, MAY_DIFFER] = None
    audio: Annotated[InputRef | None, MAY_DIFFER] = None
    controls: Annotated[tuple[Control, ...], MAY_DIFFER] = ()
    control_images: Annotated[tuple[InputRef, ...], MAY_DIFFER] = ()
    previews: Annotated[int, MAY_DIFFER] = 0

    @property
    def slots(self) -> int:
        """Slots of a batch that the job takes, one per image: of candidates as many as begin."""
        return self.n if self.best_of is None else self.best_of.candidates

    @property
    def computed_steps_per_image(self) -> int:
        """How many denoising steps are computed for each image, at least; of candidates on average.

        Of a part of the denoising one: which steps are in it depends on the noise scheduler.
        """
        if any(getattr(self, name) is not None for name in PARTS):
            return 1
        steps = int(self.steps * (self.strength or 1.0))
        computed = len(computed_steps(steps, self.step_cache))
        if self.best_of is not None and steps > 0:
            computed = int(computed * self.best_of.mean_steps(steps) / steps)
        return max(1, computed)

    def seed_of(self, index: int) -> int:
        """Return the seed of output `index`; layers of one result share it."""
        return self.seed + index // max(1, self.layers)

    @property
    def inputs(self) -> dict[str, InputRef]:
        """Stored input images, video and sound, by request field."""
        several = len(self.images) > 1
        images = {f"images.{index}" if several else "image": ref for index, ref in enumerate(self.images)}
        names = ("mask", "last_image", "video", "face_video", "audio")
        others = {name: getattr(self, name) for name in names}
        of_controls = {f"controls.{index}.image": ref for index, ref in enumerate(self.control_images)}
        return images | {name: ref for name, ref in others.items() if ref is not None} | of_controls

    @property
    def sources(self) -> tuple[str, ...]:
        """Ids of the jobs that had not ended and from whose artifacts this one starts."""
        return tuple(dict.fromkeys(ref.source.job for ref in self.inputs.values() if ref.source is not None))

    @property
    def parents(self) -> tuple[str, ...]:
        """Ids of the jobs that are to end before this one is queued."""
        return tuple(dict.fromkeys((*self.after, *self.sources)))


def matching(name: str) -> Matching:
    """Return the mark of a `Job` field."""
    return next((mark for mark in Job.model_fields[name].metadata if isinstance(mark, Matching)), MUST_MATCH)


class Thumbnail(_Frozen):
    """A stored JPEG of a video's first frame, or of a mesh; of a sound its waveform, as a PNG."""

    key: str
    content_type: str
    bytes: int
    width: int
    height: int


class Artifact(_Frozen):
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


class Failure(_Frozen):
    """The error of a job, as shown to its client."""

    code: str
    message: str
    param: str | None = None
    retryable: bool = False


class FieldWarning(_Frozen):
    """A field of the request that has no effect, or another one than was sent."""

    param: str = Field(examples=["mask"])
    message: str = Field(examples=["mask: repaints nothing"])


class Progress(_Frozen):
    """Completed and total denoising steps over all images of the job."""

    step: int = 0
    total: int = 0

    @property
    def percent(self) -> int:
        return 100 * self.step // self.total if self.total else 0


MAX_ROW_CHANGES = 64
"""Of a job's record: at most 600 bytes of JSON."""


class BatchingStats(_Frozen):
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


class Timings(_Frozen):
    """Duration of each phase in milliseconds; None if not reached."""

    queue_ms: int | None = None
    load_ms: int | None = None
    inference_ms: int | None = None
    upload_ms: int | None = None


class DeviceTimes(_Frozen):
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


class Outcome(_Frozen):
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


class JobRecord(_Frozen):
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


def encode(job: Job) -> str:
    """Return the wire form of a job: JSON that names its form."""
    set_fields = job.model_dump_json(exclude_defaults=True)
    return f'{{"schema_version":{job.schema_version},{set_fields[1:]}'  # a default itself


_UNKNOWN = frozenset(
    {
        *("extra_forbidden", "enum", "literal_error", "string_pattern_mismatch"),
        *("less_than_equal", "greater_than_equal", "greater_than", "too_long", "string_too_long", "string_too_short"),
    }
)
"""Pydantic's errors for fields and values that a model does not have, and for those beyond its bounds."""


def is_newer(wire: str | bytes) -> bool:
    """Return whether a later program has written a job that `decode` rejects.

    Such a job has a later form, or is valid but for fields, values and bounds that this program does not know.
    """
    try:
        version = json.loads(wire).get("schema_version")
        if not isinstance(version, int) or version != JOB_FORM:
            return isinstance(version, int) and version > JOB_FORM
        decode(wire)
    except ValidationError as error:
        return all(fault["type"] in _UNKNOWN for fault in error.errors(include_url=False, include_context=False))
    except (ValueError, AttributeError, RecursionError):
        return False
    return False


def decode(wire: str | bytes) -> Job:
    """Parse the wire form of a job; raises `pydantic.ValidationError` (a `ValueError`) if it is invalid."""
    return Job.model_validate_json(wire)
