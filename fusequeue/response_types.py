"""Jobs as the service returns them, and results of the client. Unknown fields of a newer service are kept."""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, SkipValidation, TypeAdapter

from fusequeue.errors import JobFailed
from fusequeue.job_fields import JobPhase, JobState, ReturnedFields
from fusequeue.params import StrPath
from fusequeue.result_files import file_name, write_file

if TYPE_CHECKING:
    from PIL.Image import Image

ENDED = frozenset({"succeeded", "failed", "canceled", "expired"})


class Resource(BaseModel):
    """An object of the HTTP API. Literals are for type checkers: a newer service may have more values."""

    model_config = ConfigDict(frozen=True, extra="allow")


class Progress(Resource):
    """Denoising steps done and in total, over all images of a job."""

    step: int = 0
    total: int = 0
    percent: int = 0


class QueuePosition(Resource):
    """Position of a queued job: 0 is next, None is unknown; `eta_s` is the time until it is expected to end, after the
    jobs that it waits for, None if it is unknown; `reason` is why it waits."""

    position: int | None = None
    eta_s: float | None = None
    reason: str | None = None


class Artifact(Resource):
    """A finished image, video, sound or mesh, or latents; `Client.read` returns its bytes. The sides of a sound are 0.

    `location` is where its job's `output` is. `score` is that of the model's scorer, of a job with `best_of`.
    """

    index: int
    url: str
    content_type: str
    bytes: int
    width: int
    height: int
    seed: int
    score: float | None = None
    flagged: bool = False
    kind: SkipValidation[Literal["image", "video", "audio", "mesh", "latents"]] = "image"
    frames: int | None = None
    fps: int | None = None
    duration_s: float | None = None
    has_audio: bool | None = None
    sample_rate: int | None = None
    channels: int | None = None
    thumbnail_url: str | None = None
    vertices: int | None = None
    faces: int | None = None
    location: str | None = None

    @property
    def was_sent(self) -> bool:
        """Whether it is at a PUT URL of its job, where the service cannot read it."""
        return self.location is not None and not self.location.startswith("s3:")


class Failure(Resource):
    """Why a job did not succeed."""

    code: str
    message: str
    param: str | None = None
    retryable: bool = False


class FieldWarning(Resource):
    """A field of a request without effect, such as a mask that repaints nothing."""

    param: str
    message: str


class Metrics(Resource):
    """Durations of a job's phases, and its share of the device's time; None if not reached."""

    queue_ms: int | None = None
    load_ms: int | None = None
    inference_ms: int | None = None
    upload_ms: int | None = None
    device_seconds: float | None = None


class DroppedCandidate(Resource):
    """A candidate that was dropped after `step`; without a `score` its values were not finite."""

    candidate: int
    step: int
    score: float | None = None


class BatchingStats(Resource):
    """A job's denoiser forwards and batch mates; `solo_reason` says why it had none."""

    forwards: int = 0
    max_jobs: int = 1
    mean_rows: float = 1.0
    skipped_steps: int = 0
    rows_by_forward: list[tuple[int, int]] = Field(default_factory=list)
    dropped: tuple[DroppedCandidate, ...] = ()
    solo_reason: str | None = None


class InputImage(Resource):
    """An image or sound that a job uses: a stored one; or the `artifact` of a `job`, of which it is a copy, or, without
    an id and bytes, what a job that had not ended when it was submitted makes."""

    id: str | None
    job: str | None = None
    artifact: int | None = None
    content_type: str
    bytes: int | None
    width: int
    height: int
    duration_s: float | None = None


class InputVideo(InputImage):
    """A video that a job uses; `fps` is the mean rate of its frames."""

    frames: int
    fps: float


class JobAdapter(Resource):
    """An adapter of a job, and its weight."""

    id: str
    scale: float


class JobControl(Resource):
    """A control image of a job; it applies from `start` to `end`, shares of the steps."""

    id: str
    kind: SkipValidation[Literal["controlnet", "ip_adapter", "redux", "structure"]]
    image: InputImage
    scale: float
    start: float
    end: float


class JobOutput(Resource):
    """Where the results of a job go: to URLs, shown without their signatures, or into a bucket."""

    put_urls: tuple[str, ...] = ()
    bucket: str | None = None
    prefix: str = ""


class JobStepCache(Resource):
    """Which steps of a job are computed: the `first` and the `last`, and one of `every` between them."""

    every: int
    first: int
    last: int
    order: SkipValidation[Literal["reuse", "linear", "quadratic"]]
    of: SkipValidation[Literal["output", "residual"]]


class JobBestOf(Resource):
    """Candidates of a job, how many of them are kept, and after which shares of the steps the worst are dropped."""

    candidates: int
    keep: int
    at: tuple[float, ...]


class JobSchedulerOptions(Resource):
    """Options of the noise scheduler of a job."""

    karras: bool = False
    exponential: bool = False
    beta: bool = False
    sde: bool = False
    shift: float | None = None
    spacing: SkipValidation[Literal["leading", "linspace", "trailing"] | None] = None
    timesteps: tuple[float, ...] | None = None
    sigmas: tuple[float, ...] | None = None


class _JobState(Resource):
    id: str
    status: SkipValidation[JobState]
    phase: SkipValidation[JobPhase | None] = None
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    expires_at: datetime | None = None
    not_before: datetime | None = None
    deadline_at: datetime | None = None
    cancel_requested: bool = False
    paused_at: datetime | None = None
    attempts: int = 0
    progress: Progress = Progress()
    queue: QueuePosition | None = None


# Its JSON has the fields of these from last to first, as that of the service.
class Job(ReturnedFields, _JobState):
    """A job: its request, state and results."""

    scheduler_options: JobSchedulerOptions | None = None
    step_cache: JobStepCache | None = None
    best_of: JobBestOf | None = None
    adapters: tuple[JobAdapter, ...] = ()
    image: InputImage | None = None
    images: tuple[InputImage, ...] = ()
    mask: InputImage | None = None
    last_image: InputImage | None = None
    video: InputVideo | None = None
    face_video: InputVideo | None = None
    audio: InputImage | None = None
    controls: tuple[JobControl, ...] = ()
    output: JobOutput | None = None
    artifacts: tuple[Artifact, ...] = ()
    error: Failure | None = None
    warnings: tuple[FieldWarning, ...] = ()
    metrics: Metrics = Metrics()
    resumed_at_step: int | None = None
    batching: BatchingStats | None = None

    @property
    def ended(self) -> bool:
        """Whether the state is final."""
        return self.status in ENDED

    @property
    def flagged(self) -> list[int]:
        """Indexes of the artifacts that the model's safety checker flagged."""
        return [artifact.index for artifact in self.artifacts if artifact.flagged]

    def require_success(self) -> Job:
        """Return the job if it succeeded; raises `JobFailed` if it ended otherwise, ValueError if it has not ended."""
        if not self.ended:
            raise ValueError(f"job {self.id} is still {self.status}")
        if self.status != "succeeded":
            raise JobFailed(self)
        return self


class Event(Resource):
    """One message of a job's event stream; `job` is set on the last one."""

    id: str
    status: SkipValidation[JobState]
    phase: SkipValidation[JobPhase | None] = None
    progress: Progress = Progress()
    job: Job | None = None


@dataclass(frozen=True)
class Result:
    """A succeeded job with the bytes of its images or videos, and their `files` if they were saved.

    What was sent to a PUT URL is not among them. `index` is the number of its prompt in `map`.
    """

    job: Job
    data: tuple[bytes, ...]
    files: tuple[Path, ...] = ()
    index: int = 0

    def __repr__(self) -> str:
        """Return what it is in a line, without its bytes."""
        sizes = ", ".join(f"{len(data):,} bytes" for data in self.data)
        return f"<Result of {self.job.id}: {self.job.model}, seed {self.job.seed}, {sizes or 'no data'}>"

    def _repr_png_(self) -> bytes | None:
        """Return the first PNG, which notebooks show."""
        return next((data for data in self.data if data.startswith(b"\x89PNG")), None)

    def save(self, folder: StrPath, *, name: str | None = None) -> Result:
        """Save the data as `folder/name-index.ext`, atomically; `name` defaults to the job id."""
        names = [file_name(artifact, name or self.job.id) for artifact in self.job.artifacts if not artifact.was_sent]
        files = tuple(Path(folder) / file for file in names)
        for file, data in zip(files, self.data, strict=True):
            write_file(file, data)
        return replace(self, files=files)

    def images(self) -> list[Image]:
        """Return the images as those of Pillow, which has to be installed."""
        from PIL import Image as pillow

        return [pillow.open(io.BytesIO(data)) for data in self.data]


class Created(BaseModel):
    """An object of which the client needs only the id: an upload, a file."""

    id: str


class LineFailure(Failure):
    """Why a line of a bulk submit is refused; `errors` are all its faults, of which this is the first.

    `status` is that of the same error in response to a single submit.
    """

    status: int | None = None
    retry_after_s: float | None = None
    errors: tuple[Failure, ...] = ()


class LineResult(Resource):
    """Result of one job of a bulk submit; `line` counts from 1, `key` is that of the line."""

    line: int
    key: str | None = None
    id: str | None = None
    replayed: bool = False
    url: str | None = None
    error: LineFailure | None = None


class BulkFailure(Resource):
    """Why the rest of a bulk submit got no result."""

    error: LineFailure


BULK_ROW: TypeAdapter[LineResult | BulkFailure] = TypeAdapter(
    Annotated[LineResult | BulkFailure, Field(union_mode="left_to_right")]
)


def event(data: dict[str, Any]) -> Event:
    """Parse an event; the event of an ended job contains the whole job."""
    if data.get("status") in ENDED and "prompt" in data:
        job = Job.model_validate(data)
        return Event(id=job.id, status=job.status, phase=job.phase, progress=job.progress, job=job)
    return Event.model_validate(data)


T = TypeVar("T", bound=BaseModel)


class Page(BaseModel, Generic[T]):
    """A page of a list; `next_cursor`, or the id of the last item, continues it."""

    data: list[T]
    has_more: bool = False
    next_cursor: str | None = None
    last_id: str | None = None
