"""Types that cross the boundary between the worker and its engine; nothing here imports torch."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from shared.config.adapters import AdapterSpec
from shared.config.catalog import Catalog
from shared.config.model_facts import ModelFacts
from shared.config.model_spec import ModelSpec
from shared.config.settings import Settings
from shared.errors import JobError
from shared.job import Job, Phase
from shared.job_record import BatchingStats, DeviceTimes, FieldWarning
from shared.model_inputs import ModelInput
from worker.engine.engine_status import EngineStatus
from worker.engine.outputs import Audio, Latents, Mesh, Output, Pixels


@dataclass(frozen=True)
class InputFiles:
    """The files of a job's input images, of its videos, and of the sound that it starts from."""

    images: tuple[bytes, ...] = ()
    mask: bytes | None = None
    last_image: bytes | None = None
    controls: tuple[bytes, ...] = ()
    video: bytes | None = None
    audio: bytes | None = None
    face_video: bytes | None = None


@dataclass(frozen=True)
class EngineRequest:
    """One job for the engine. `claim_key` is unique to this claim of the job.

    A job that `must_run_solo` shares no forward. `queued_since_s` is a `time.monotonic()` time, None if the job was not
    queued; `start_by_s` is one too, the latest start of a job with a deadline.
    `adapters` are the uploaded ones of the job, as local files. `checkpoints` are those of its images, from which they
    continue; one that is refused is logged, and its image begins anew. `checkpoint_s` is the device time of the job
    that a loss of this worker may cost: after it, the engine takes checkpoints by itself. None: the job can have none.
    """

    claim_key: str
    job: Job
    spec: ModelSpec
    inputs: InputFiles = InputFiles()
    must_run_solo: bool = False
    queued_since_s: float | None = None
    start_by_s: float | None = None
    adapters: tuple[AdapterSpec, ...] = ()
    checkpoints: tuple[bytes | None, ...] = ()
    checkpoint_s: float | None = None


@dataclass(frozen=True)
class JobPhaseChanged:
    """A job waits for its model or adapters to be loaded, or its first image is decoded."""

    claim_key: str
    phase: Phase


@dataclass(frozen=True)
class JobProgress:
    """Denoising steps done, of all steps of the job's images."""

    claim_key: str
    step: int
    total: int


@dataclass(frozen=True)
class PreviewReady:
    """The next preview of image `index` of a job, smaller than the image."""

    claim_key: str
    index: int
    pixels: Pixels


@dataclass(frozen=True)
class CandidatesDropped:
    """Images of a job are not finished, and take part in no further forward; `running` ones are."""

    claim_key: str
    running: int


@dataclass(frozen=True)
class ImageCheckpoint:
    """A file from which an image continues after `step` of `total` steps."""

    data: bytes
    step: int
    total: int


@dataclass(frozen=True)
class CheckpointTaken:
    """Checkpoints of the images of a job, on request or because of its `checkpoint_s`.

    None for an image that has not gone beyond the checkpoint it began with; no images for a job that has not started.
    `device_seconds` is the job's share of the engine's work so far. `reason` is why it can have no checkpoint.
    """

    claim_key: str
    images: tuple[ImageCheckpoint | None, ...] = ()
    device_seconds: float = 0.0
    reason: str | None = None


@dataclass(frozen=True)
class OutputReady:
    """Output `index` of a job; the layers of one image have consecutive indexes."""

    claim_key: str
    index: int
    output: Output | Audio | Mesh | Latents


@dataclass(frozen=True)
class JobFinished:
    """A job left the engine; its last event. `canceled` is also set for a job released at the end of a drain.

    `resumed_steps` are those of all its images that its checkpoints spared.
    """

    claim_key: str
    error: JobError | None = None
    canceled: bool = False
    batching: BatchingStats = field(default_factory=BatchingStats)
    load_ms: int | None = None
    inference_ms: int | None = None
    device_seconds: float = 0.0
    warnings: tuple[FieldWarning, ...] = ()
    device_times: DeviceTimes | None = None
    resumed_steps: int = 0


@dataclass(frozen=True)
class ForwardDone:
    """A denoiser forward that succeeded. `rows` counts images, without the doubling of guidance.

    `padding` counts the copies that filled the forward up. `claim_key` is that of one of its jobs. `own_code_s` is how
    long the own code of as many image tasks took after earlier forwards, 0 after the first.
    """

    model: str
    rows: int
    jobs: int
    seconds: float
    device: str
    shape: str
    claim_key: str
    padding: int = 0
    own_code_s: float = 0.0

    @property
    def step_s(self) -> float:
        """Seconds from the start of this forward to that of the next one."""
        return self.seconds + self.own_code_s


@dataclass(frozen=True)
class ModelLoaded:
    """A model is in device memory; its weights came from its files, or from CPU memory.

    `layers` are the inputs and outputs of the layers of the denoisers that adapters can change, by path; `inputs` those
    of its pipeline that jobs have no field for; `facts` what requests are checked with.
    """

    model: str
    seconds: float
    from_cpu_memory: bool = False
    layers: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    inputs: tuple[ModelInput, ...] = ()
    facts: ModelFacts = field(default_factory=ModelFacts)


@dataclass(frozen=True)
class ModelLoadFailed:
    model: str


@dataclass(frozen=True)
class MemoryExhausted:
    """A forward of the model ran out of device memory."""

    model: str


@dataclass(frozen=True)
class ForwardRetried:
    """A forward failed and was repeated in parts; `retries` counts the failed ones."""

    model: str
    retries: int


JobEvent: TypeAlias = (
    JobPhaseChanged | JobProgress | PreviewReady | CandidatesDropped | CheckpointTaken | OutputReady | JobFinished
)
ModelEvent: TypeAlias = ModelLoaded | ModelLoadFailed | MemoryExhausted | ForwardRetried
EngineEvent: TypeAlias = JobEvent | ForwardDone | ModelEvent


@dataclass(frozen=True)
class WarmUpDone:
    """Message of the engine's process, after the events of its warm-up."""


class EngineEvents(Protocol):
    def on_event(self, event: EngineEvent) -> None:
        """Take the next event; called on the engine's thread or on the one that reads its socket: it must not block."""


@dataclass(frozen=True)
class MemoryOrder:
    """An operator's order to load a model, or to unload it; `number` is larger for a later one."""

    model: str
    unload: bool
    number: tuple[int, str]


@dataclass(frozen=True)
class MemoryOrders:
    """What operators want of this worker's models: `pinned`, the first pin first, and the last order for each model."""

    pinned: tuple[str, ...] = ()
    last: tuple[MemoryOrder, ...] = ()


class EngineInterface(Protocol):
    """An engine on a thread or in a process. Only `warm_up` and `stop` block."""

    def start(self) -> None: ...

    def warm_up(self) -> None:
        """Load the catalog's models while memory allows; returns when each has loaded or failed."""

    def stop(self, timeout_s: float) -> None:
        """Stop after the present forward and cancel unfinished jobs; waits up to `timeout_s`."""

    def submit(self, *requests: EngineRequest) -> None:
        """Add jobs, which start together; `JobFinished` is the last event of each."""

    def cancel(self, claim_key: str) -> None:
        """Remove a job at its next step; ignores unknown keys."""

    def release_all(self) -> None:
        """Cancel all unfinished jobs."""

    def take_checkpoints(self, *claim_keys: str) -> None:
        """Take checkpoints after the present forward: each job that has not finished by then gets `CheckpointTaken`."""

    def hand_over(self, *claim_keys: str) -> None:
        """Take checkpoints after the present forward, and cancel the jobs: each runs no further step.

        A job that can have no checkpoint runs on; its `CheckpointTaken` has the reason.
        """

    def order_models(self, orders: MemoryOrders) -> None:
        """Follow these orders from now on, between forwards; those before `warm_up` decide what it loads."""

    def replace_models(self, catalog: Catalog, changed: Collection[str]) -> None:
        """Serve these models from now on; free those of `changed`, which have no jobs, and load them as listed now."""

    def status(self) -> EngineStatus: ...


EngineFactory: TypeAlias = Callable[[Catalog, EngineEvents, Settings], EngineInterface]
