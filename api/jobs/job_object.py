"""Jobs as the native API returns them."""

from collections.abc import Callable
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from shared.config.adapters import Adapter
from shared.config.candidates import DroppedCandidate
from shared.config.destinations import Destination
from shared.job import InputRef, Job, Phase, State
from shared.job_fields import CallFields, ChosenFields, PipelineFields, ServiceFields
from shared.job_record import Artifact, FieldWarning, JobRecord
from shared.queue.order.position import QueueReason


class ProgressObject(BaseModel):
    """Denoising steps done and in total, over all images of the job."""

    step: int
    total: int
    percent: int = Field(ge=0, le=100)


class QueueObject(BaseModel):
    """Position of a queued job; 0 is next, null is unknown, and of a job that waits for its time or for others."""

    position: int | None
    eta_s: float | None = Field(
        description="Seconds until the job is expected to be finished: one that waits, after its `not_before` and the "
        "jobs that it waits for; null if it is unknown, and while no worker serves its model or theirs."
    )
    reason: QueueReason | None = Field(description="Why the job waits.")


QUEUE_UNKNOWN = QueueObject(position=None, eta_s=None, reason=None)
QUEUE_WAITING = QueueObject(position=None, eta_s=None, reason=QueueReason.WAITING)
QUEUE_PAUSED = QueueObject(position=None, eta_s=None, reason=QueueReason.PAUSED)


class ImageObject(BaseModel):
    """An input image, or latents, of which width and height are their own; or a sound. It is stored, or was an artifact
    of a job that had not ended, and is what that job makes. A copy of an artifact names it too."""

    id: str | None = Field(description="Null of an artifact of a job that had not ended.")
    job: str | None = Field(None, description="The job whose artifact it is.")
    artifact: int | None = Field(None, description="The index of that artifact.")
    content_type: str
    bytes: int | None = Field(description="Null of an artifact of a job that had not ended.")
    width: int
    height: int
    duration_s: float | None = Field(None, description="Of a sound, whose width and height are 0.")


class InputVideoObject(ImageObject):
    """A stored input video; `fps` is the mean rate of its frames."""

    frames: int
    fps: float


class ArtifactObject(BaseModel):
    """A finished image, video, sound or mesh, or latents, of which width and height are their own; `flagged` by the
    model's safety checker. `frames` to `channels`: videos, and sounds as far as they have them, whose sides are 0.
    Width and height of a mesh are those of its thumbnail.
    """

    index: int
    kind: Literal["image", "video", "audio", "mesh", "latents"]
    url: str
    content_type: str
    bytes: int
    width: int
    height: int
    seed: int
    score: float | None = Field(
        None, description="Of a job with `best_of`: that of the model's scorer, at the last share."
    )
    flagged: bool
    frames: int | None
    fps: int | None
    duration_s: float | None
    has_audio: bool | None
    sample_rate: int | None = Field(None, description="Of a sound: samples a second.")
    channels: int | None = Field(None, description="Of a sound.")
    thumbnail_url: str | None = Field(
        description="A JPEG of a video's first frame, or of a mesh; a PNG of a sound's waveform."
    )
    vertices: int | None = Field(None, description="Of a mesh.")
    faces: int | None = Field(None, description="Of a mesh.")
    location: str | None = Field(
        description="Where it was sent, if the job has an `output`: `s3://bucket/key`, which `url` reads, or an https "
        "URL without its query, which the service cannot read."
    )


class FailureObject(BaseModel):
    """Why a job did not succeed; `retryable` if the same job can succeed later."""

    code: str
    message: str
    param: str | None
    retryable: bool


class MetricsObject(BaseModel):
    """Milliseconds spent in each phase, and the device seconds of the job; null if not reached."""

    queue_ms: int | None
    load_ms: int | None
    inference_ms: int | None
    upload_ms: int | None
    device_seconds: float | None = Field(
        description="The job's share of the device's time, in the run that ended it: of each forward by its rows."
    )


class BatchingObject(BaseModel):
    """Batching over the job's denoiser forwards; `solo_reason` if it never had batch mates."""

    forwards: int
    max_jobs: int
    mean_rows: float
    skipped_steps: int = Field(0, description="Steps of its images that step caching answered without a forward.")
    rows_by_forward: tuple[tuple[int, int], ...] = Field(
        (),
        description="Rows of its forwards in order, as pairs of rows and number of forwards; up to 64 pairs.",
    )
    dropped: tuple[DroppedCandidate, ...] = Field(
        (), description="Candidates of `best_of` that were not finished, in the order in which they were dropped."
    )
    solo_reason: str | None


class ControlObject(BaseModel):
    id: str
    kind: Literal["controlnet", "ip_adapter", "redux", "structure"]
    image: ImageObject
    scale: float
    start: float
    end: float


class OutputObject(BaseModel):
    """Where the artifacts of a job go: to a URL each, shown without their signatures, or into a bucket."""

    put_urls: list[str]
    bucket: str | None
    prefix: str


class UrlsObject(BaseModel):
    self: str
    cancel: str
    events: str = Field(description="Where keys are required, signed: a browser's EventSource sends no headers.")


class JobState(BaseModel):
    """The state of a job. Times are ISO 8601 in UTC with milliseconds."""

    id: str = Field(examples=["job_01ja3v5c8zq3m7x2r4t6w8y0ab"])
    object: Literal["job"] = "job"
    status: State
    phase: Phase | None = Field(description="What a running job is doing.")
    created_at: str = Field(examples=["2026-01-31T12:00:00.000Z"])
    started_at: str | None
    finished_at: str | None
    expires_at: str | None = Field(description="When the job and its images will be deleted.")
    not_before: str | None = Field(description="When the job is queued: until then, `queue.reason` is `waiting`.")
    deadline_at: str | None
    cancel_requested: bool
    paused_at: str | None = Field(
        description="Since when the job is paused; a running one then stops at its next step."
    )
    attempts: int
    progress: ProgressObject
    queue: QueueObject | None = Field(description="Only while the job is queued.")


# Its JSON has the fields of these from last to first.
class JobObject(ServiceFields, CallFields, ChosenFields, PipelineFields, JobState):
    """A job: its state, its request with every default resolved, and its results."""

    model_config = ConfigDict(json_schema_serialization_defaults_required=True)

    adapters: tuple[Adapter, ...]
    image: ImageObject | None = Field(description="The first of `images`.")
    images: list[ImageObject]
    mask: ImageObject | None
    last_image: ImageObject | None
    video: InputVideoObject | None = Field(description="Of it, the job uses `frames` frames from its beginning.")
    face_video: InputVideoObject | None = Field(description="The faces that the person of `image` has.")
    audio: ImageObject | None = Field(description="The sound to start from.")
    controls: list[ControlObject]
    output: OutputObject | None = Field(description="Null: the artifacts are stored here, and deleted with the job.")
    artifacts: list[ArtifactObject]
    error: FailureObject | None
    warnings: list[FieldWarning] = Field(description="Fields without effect, such as a mask that repaints nothing.")
    metrics: MetricsObject
    resumed_at_step: int | None = Field(
        description="Steps of all its images that were not computed again, as its last run continued from a checkpoint "
        "of an earlier one; null if it began anew."
    )
    batching: BatchingObject | None = Field(description="Null until the job has run.")
    urls: UrlsObject


def iso(at_ms: int | None) -> str | None:
    """Return a time as ISO 8601 in UTC."""
    if at_ms is None:
        return None
    return f"{datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec='milliseconds')[:-6]}Z"


def job_object(
    record: JobRecord,
    base_url: str,
    queue: QueueObject | None = None,
    *,
    sign: Callable[[str, int | Literal["events"]], str] = lambda job_id, part: "",
) -> JobObject:
    """Return `record` for its client, with URLs below `base_url`; `sign` returns the query of a URL for reading."""
    job, url = record.job, f"{base_url}/v1/jobs/{record.job.id}"
    timings, batching = record.timings, record.batching
    return JobObject(
        **dict(zip(_REQUEST_FIELDS, _request_fields(job), strict=True)),
        status=record.state,
        phase=record.phase if record.state is State.RUNNING else None,
        created_at=iso(job.created_at_ms) or "",
        started_at=iso(record.started_at_ms),
        finished_at=iso(record.finished_at_ms),
        expires_at=iso(record.expires_at_ms),
        not_before=iso(job.not_before_ms),
        deadline_at=iso(record.deadline_at_ms),
        cancel_requested=record.cancel_requested,
        paused_at=iso(record.paused_at_ms),
        attempts=record.attempts,
        progress=ProgressObject(
            step=record.progress.step, total=record.progress.total, percent=min(100, record.progress.percent)
        ),
        queue=(queue or _unread_queue(record)) if record.state is State.QUEUED else None,
        image=_image(job.images[0]) if job.images else None,
        images=[_image(image) for image in job.images],
        mask=None if job.mask is None else _image(job.mask),
        last_image=None if job.last_image is None else _image(job.last_image),
        video=None if job.video is None else _video(job.video),
        face_video=None if job.face_video is None else _video(job.face_video),
        audio=None if job.audio is None else _image(job.audio),
        controls=[
            ControlObject(image=_image(image), **control.model_dump())
            for control, image in zip(job.controls, job.control_images, strict=True)
        ],
        output=None if job.output is None else _output(job.output),
        artifacts=[
            _artifact(artifact, f"{url}/artifacts/{artifact.index}", sign(job.id, artifact.index))
            for artifact in record.artifacts
        ],
        error=None if record.error is None else FailureObject(**record.error.model_dump()),
        warnings=list(record.warnings),
        metrics=MetricsObject(**timings.model_dump(), device_seconds=record.device_seconds),
        resumed_at_step=record.resumed_steps or None,
        batching=None if batching is None else BatchingObject(**batching.model_dump()),
        urls=UrlsObject(self=url, cancel=f"{url}/cancel", events=f"{url}/events{sign(job.id, 'events')}"),
    )


def _unread_queue(record: JobRecord) -> QueueObject:
    """Return what the record alone says of why a queued job waits."""
    if record.paused_at_ms is not None:
        return QUEUE_PAUSED
    return QUEUE_WAITING if record.waits else QUEUE_UNKNOWN


_CONVERTED = {"images", "mask", "last_image", "video", "face_video", "audio", "controls", "output"}
_REQUEST_FIELDS = tuple(sorted(frozenset(Job.model_fields) & frozenset(JobObject.model_fields) - _CONVERTED))
_request_fields = attrgetter(*_REQUEST_FIELDS)


def _image(image: InputRef) -> ImageObject:
    return ImageObject(**_input_fields(image))


def _video(video: InputRef) -> InputVideoObject:
    return InputVideoObject(**_input_fields(video))


def _input_fields(ref: InputRef) -> dict[str, Any]:
    fields = ref.model_dump(exclude={"key", "source", "copy_of"})
    if ref.source is not None:
        return fields | {"id": None, "bytes": None} | ref.source.model_dump()
    return fields if ref.copy_of is None else fields | ref.copy_of.model_dump()


def _output(output: Destination) -> OutputObject:
    return OutputObject(**output.without_signatures().model_dump())


def _artifact(artifact: Artifact, url: str, query: str) -> ArtifactObject:
    return ArtifactObject(
        url=url + query,
        # The signature of a video covers its thumbnail.
        thumbnail_url=None if artifact.thumbnail is None else f"{url}/thumbnail{query}",
        location=artifact.location,  # omitted from the dump if it is None
        **artifact.model_dump(exclude={"key", "thumbnail", "location"}),
    )
