"""Arguments of the client: the parameters of a job. Those of one value are in `job_fields`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from os import PathLike
from typing import IO, TYPE_CHECKING, Literal, NotRequired, Protocol, TypeAlias, TypedDict, runtime_checkable

from fusequeue.job_fields import CacheLevelName, JobEventName, SentFields

if TYPE_CHECKING:
    from fusequeue.response_types import Artifact, Job, Result

StrPath: TypeAlias = str | PathLike[str]
StartTime: TypeAlias = datetime | timedelta | float | str
"""A time with its zone, also as ISO 8601; or a delay from the submit, also as a number of seconds."""


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
"""A file's path, an open file, its bytes, or an image of Pillow; of a video, one of the first three."""


class ArtifactParams(TypedDict):
    """An artifact of a job, by its index; of a job itself, it is the first."""

    job: str | Job
    artifact: NotRequired[int]


ImageSource: TypeAlias = "ImageFile | Job | Result | Artifact | ArtifactParams"
"""An image or video of a job: one to upload; or what the service reads itself: the id of an upload, an https or data
URL, a job or its result, or an artifact."""


class AdapterParams(TypedDict):
    """An adapter of the model by `id`; or by the `url` of a safetensors file, or by `owner/name` on the `hub`, with
    its `file` and `revision`, where the service allows the host. `scale` defaults to the adapter's own."""

    id: NotRequired[str]
    url: NotRequired[str]
    hub: NotRequired[str]
    file: NotRequired[str | None]
    revision: NotRequired[str | None]
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


class BestOfParams(TypedDict):
    """Of `candidates` images `keep` are finished; the worst are dropped after the shares `at` of the steps."""

    candidates: int
    keep: NotRequired[int]
    at: NotRequired[Sequence[float]]


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


class JobParams(SentFields, total=False):
    """Parameters of a job, as in `POST /v1/jobs`; None is the same as leaving one out."""

    scheduler: str | SchedulerParams | None
    """The noise scheduler: a class of diffusers or a short name; with options a mapping. Unset: the model's."""
    scheduler_options: SchedulerOptionsParams | None
    """Options of the noise scheduler."""
    step_cache: CacheLevelName | StepScheduleParams | None
    """Skip steps and extrapolate them: faster, less exact."""
    best_of: BestOfParams | None
    """Begin more images than are kept, and drop those that the model's scorer finds worst."""
    adapters: Sequence[AdapterParams] | None
    """LoRA adapters and embeddings, each with its `scale`."""
    image: ImageSource | None
    """What is changed or edited, or the first frame of a video."""
    images: Sequence[ImageSource] | None
    """Several images, for models that edit with them."""
    mask: ImageSource | None
    """Where `image` is repainted: white."""
    last_image: ImageSource | None
    """The last frame of a video."""
    video: ImageSource | None
    """What is changed or extended, or moves the person of `image`."""
    face_video: ImageSource | None
    """The face that the person of `image` gets, on models that need it; `video` is one of poses."""
    audio: ImageSource | None
    """A sound that is changed."""
    controls: Sequence[ControlParams] | None
    """Images for the model's controls: ControlNets, T2I-Adapters, IP-Adapters, Redux, images of structure."""
    not_before: StartTime | None
    """Queue the job at this time, or after this delay, a number being seconds; at most 30 days from now. A
    `deadline_s` counts from then."""
    output: OutputParams | None
    """Where the results go, if not to the service's storage."""
    webhook_events: Sequence[JobEventName] | None
    """Events that `webhook` receives. Unset: those that end a job."""


class SubmitParams(JobParams, total=False):
    """Parameters of a job, and two of its request."""

    idempotency_key: str | None
    """Submits with the same one make one job. Unset: each call is one."""
    extra_body: Mapping[str, object] | None
    """Fields that this version does not know, sent as they are."""
