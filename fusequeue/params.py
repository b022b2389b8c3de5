"""Arguments of the client: the parameters of a job, and the values that they can have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import IO, TYPE_CHECKING, Literal, NotRequired, Protocol, TypeAlias, TypedDict, runtime_checkable

if TYPE_CHECKING:
    from fusequeue.response_types import Artifact, Job, Result

JobState: TypeAlias = Literal["queued", "running", "succeeded", "failed", "canceled", "expired"]
JobPhase: TypeAlias = Literal["loading", "denoising", "decoding", "uploading"]
PriorityName: TypeAlias = Literal["interactive", "standard", "bulk"]
OnDeadlineName: TypeAlias = Literal["expire", "run"]
TaskName: TypeAlias = Literal["text_to_image", "image_to_image", "inpaint", "edit", "text_to_video", "image_to_video"]
FormatName: TypeAlias = Literal["png", "jpeg", "webp", "mp4"]
CacheLevelName: TypeAlias = Literal["off", "light", "medium", "strong"]
JobEventName: TypeAlias = Literal[
    "job.queued", "job.running", "job.succeeded", "job.failed", "job.canceled", "job.expired"
]
EndpointEventName: TypeAlias = (
    JobEventName
    | Literal["batch.completed", "batch.failed", "batch.expired", "batch.cancelled", "video.completed", "video.failed"]
)
"""What an endpoint can subscribe to: events of jobs, and OpenAI's of batches and videos."""

StrPath: TypeAlias = str | PathLike[str]


@runtime_checkable
class ReadableFile(Protocol):
    """A file open in binary mode."""

    def read(self, size: int = ..., /) -> bytes: ...


@runtime_checkable
class PillowImage(Protocol):
    """An image of Pillow, which the client itself does not need."""

    @property
    def mode(self) -> str: ...

    def save(self, fp: IO[bytes], format: str, /) -> None: ...


ImageFile: TypeAlias = StrPath | bytes | bytearray | memoryview | ReadableFile | PillowImage
"""A file's path, an open file, its bytes, or an image of Pillow."""

ImageSource: TypeAlias = "ImageFile | Job | Result | Artifact"
"""An image of a job: one to upload; or what the service reads itself: the id of an upload, an https or data URL, a job
or its result, or an artifact."""


class AdapterParams(TypedDict):
    """A LoRA adapter of the model; `scale` defaults to the adapter's own."""

    id: str
    scale: NotRequired[float | None]


class ControlParams(TypedDict):
    """A control image; it applies from `start` to `end`, shares of the steps."""

    id: str
    image: ImageSource
    scale: NotRequired[float | None]
    start: NotRequired[float]
    end: NotRequired[float]


class OutputParams(TypedDict, total=False):
    """Where results go: presigned URLs that each receive one with a PUT, or a bucket that the operator allows."""

    put_url: str
    put_urls: Sequence[str]
    bucket: str
    prefix: str


class StepScheduleParams(TypedDict):
    """The `first` and `last` steps are computed, and one of `every` between them."""

    every: int
    first: NotRequired[int]
    last: NotRequired[int]
    order: NotRequired[Literal["reuse", "linear", "quadratic"]]
    of: NotRequired[Literal["output", "residual"]]


class SchedulerOptionsParams(TypedDict, total=False):
    """Options of a noise scheduler; `timesteps` or `sigmas` are the steps themselves, without the final 0."""

    karras: bool
    exponential: bool
    beta: bool
    sde: bool
    shift: float | None
    spacing: Literal["leading", "linspace", "trailing"] | None
    timesteps: Sequence[float] | None
    sigmas: Sequence[float] | None


class SchedulerParams(SchedulerOptionsParams, total=False):
    """A noise scheduler with options; without a name the model's own."""

    name: str | None


class JobParams(TypedDict, total=False):
    """Parameters of a job, as in `POST /v1/jobs`; None is the same as leaving one out."""

    negative_prompt: str | None
    width: int | None
    height: int | None
    n: int | None
    seed: int | None
    steps: int | None
    guidance_scale: float | None
    guidance_scale_2: float | None
    scheduler: str | SchedulerParams | None
    scheduler_options: SchedulerOptionsParams | None
    prompt_2: str | None
    clip_skip: int | None
    max_sequence_length: int | None
    true_cfg_scale: float | None
    guidance_rescale: float | None
    step_cache: CacheLevelName | StepScheduleParams | None
    adapters: Sequence[AdapterParams] | None
    task: TaskName | None
    image: ImageSource | None
    images: Sequence[ImageSource] | None
    mask: ImageSource | None
    last_image: ImageSource | None
    controls: Sequence[ControlParams] | None
    strength: float | None
    keep_unmasked: bool | None
    mask_blur: int | None
    mask_padding: int | None
    frames: int | None
    fps: int | None
    layers: int | None
    reproducible: bool | None
    output_format: FormatName | None
    output_quality: int | None
    embed_parameters: bool | None
    output: OutputParams | None
    priority: PriorityName | None
    deadline_s: float | None
    on_deadline: OnDeadlineName | None
    metadata: Mapping[str, str] | None
    batch_id: str | None
    webhook: str | None
    webhook_events: Sequence[JobEventName] | None


class SubmitParams(JobParams, total=False):
    """Parameters of a job, and two of its request.

    Submits with one `idempotency_key` make one job; by default each call is one. `extra_body` are fields that this
    version does not know, sent as they are.
    """

    idempotency_key: str | None
    extra_body: Mapping[str, object] | None
