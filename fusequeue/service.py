"""Models, queues, workers and dead letters as the service returns them."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal, TypeAlias

from pydantic import Field, SkipValidation

from fusequeue.job_fields import CacheLevelName, PriorityName, TaskName
from fusequeue.response_types import Job, Resource


class Defaults(Resource):
    """Defaults of a model's parameters."""

    width: int
    height: int
    steps: int
    guidance_scale: float
    strength: float
    negative_prompt: str | None = None
    guidance_scale_2: float | None = None
    scheduler: str | dict[str, Any] | None = None
    frames: int | None = None
    fps: int = 24
    duration_s: float | None = None
    layers: int = 0
    extra: dict[str, Any] = Field(default_factory=dict)


class Limits(Resource):
    """Limits of a model's parameters; both sides are multiples of `multiple_of`."""

    min_side: int
    max_side: int
    max_pixels: int
    multiple_of: int
    min_steps: int
    max_steps: int
    max_guidance_scale: float
    min_frames: int = 1
    max_frames: int = 1
    frames_multiple: int = 1
    fps: int | None = None
    min_duration_s: float = 1.0
    max_duration_s: float | None = None
    last_image: SkipValidation[Literal["refused", "allowed", "needed"]] = "refused"
    max_layers: int = 0
    max_input_images: int = 1
    max_input_frames: int = 3000
    max_input_video_pixels: int = 4096 * 2304
    max_input_video_bytes: int | None = None
    max_images: int
    max_prompt_chars: int
    max_sequence_length: int = 512
    max_adapters: int = 0
    max_controls: int = 0


class AdapterInfo(Resource):
    """An adapter of a model, with its default and its largest scale; an embedding has none, but a word in prompts."""

    id: str
    kind: SkipValidation[Literal["lora", "embedding"]] = "lora"
    token: str | None = None
    scale: float
    max_scale: float


class ControlInfo(Resource):
    """A control of a model, with its default and its largest scale."""

    id: str
    kind: SkipValidation[Literal["controlnet", "ip_adapter", "redux", "structure"]]
    scale: float
    max_scale: float


class RefinerInfo(Resource):
    """The refiner of a model: `start` is the `refiner_start` of jobs that do not say, 1 for no refiner."""

    start: float
    tasks: tuple[SkipValidation[TaskName], ...] = ()


class StepCacheInfo(Resource):
    """What `step_cache` can be for a model, and its default."""

    default: SkipValidation[CacheLevelName] = "off"
    allowed: tuple[SkipValidation[Literal["light", "medium", "strong", "schedule"]], ...] = ()


MemoryState: TypeAlias = Literal["loaded", "loading", "kept", "failed", "not_loaded"]
"""Where a worker has a model: `loaded` in device memory, `kept` in CPU memory."""


class ModelWorkers(Resource):
    """How many live workers have a model where."""

    loaded: int = 0
    loading: int = 0
    kept: int = 0
    failed: int = 0
    not_loaded: int = 0


class ModelInput(Resource):
    """An input of a model that jobs have no field of their own for; `type_schema` is the JSON Schema of its values."""

    name: str
    description: str = ""
    type_schema: dict[str, SkipValidation[Any]] = Field(default_factory=dict, alias="schema")
    default: SkipValidation[Any] = None
    tasks: tuple[SkipValidation[TaskName], ...] = ()


class Model(Resource):
    """A model, with the defaults and limits of its jobs; `max_batch` images fit into one fused forward."""

    id: str
    aliases: tuple[str, ...] = ()
    tasks: tuple[SkipValidation[TaskName], ...]
    defaults: Defaults
    limits: Limits
    schedulers: tuple[str, ...] = ()
    adapters: tuple[AdapterInfo, ...] = ()
    controls: tuple[ControlInfo, ...] = ()
    refiner: RefinerInfo | None = None
    scorer: SkipValidation[Literal["prompt", "head"] | None] = None
    upscale_factors: tuple[float, ...] = ()
    extra: tuple[ModelInput, ...] | None = None
    step_cache: StepCacheInfo = StepCacheInfo()
    prompt_syntax: str = "plain"
    mixed_fields: tuple[str, ...] = ()
    max_batch: int
    window_ms: int
    workers: ModelWorkers | None = None


class QueueDepth(Resource):
    """Queued and running jobs of one signature; `jobs` and `slots` are those queued.

    `spared_slots` is the work, in slots, that checkpoints of queued jobs spare.
    """

    signature: str
    model: str
    jobs: dict[SkipValidation[PriorityName], int]
    slots: dict[SkipValidation[PriorityName], int]
    running_jobs: int
    oldest_age_ms: int | None = None
    eta_s: float | None = None
    waiting_ms: int | None = None
    bulk_age_ms: int | None = None
    paused: bool = False
    spared_slots: dict[SkipValidation[PriorityName], float] = Field(default_factory=dict)


class UnavailableModel(Resource):
    """Why a worker cannot load a model; the load is repeated unless it is `permanent`."""

    reason: str
    permanent: bool
    retry_in_s: float


class WorkerInfo(Resource):
    """A worker at its last heartbeat; `forwards` counts denoiser forwards, `forward_rows` the images in them."""

    id: str
    models: tuple[str, ...]
    state: SkipValidation[Literal["starting", "ready", "unavailable", "draining"]]
    slots: int = 0
    free_slots: int = 0
    running_jobs: int = 0
    bulk_jobs: int = 0
    running_slots: int = 0
    device: str = ""
    memory_bytes: int = 0
    models_bytes: int = 0
    loaded: tuple[str, ...] = ()
    worker_pool: str = "default"
    loading: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    pinned: tuple[str, ...] = ()
    kept_bytes: int = 0
    models_limit_bytes: int = 0
    model_bytes: dict[str, int] = Field(default_factory=dict)
    unavailable: dict[str, UnavailableModel] = Field(default_factory=dict)
    models_fault: str | None = None
    host: str = ""
    pid: int = 0
    version: str = ""
    ready_s: float | None = None
    forwards: int = 0
    forward_rows: int = 0
    busy_s: float = 0.0
    idle_while_queued_s: float = 0.0

    def memory_state(self, model: str) -> MemoryState:
        """Return where the worker has one of its models."""
        if model in self.loaded:
            return "loaded"
        if model in self.unavailable:
            return "failed"
        if model in self.loading:
            return "loading"
        return "kept" if model in self.kept else "not_loaded"


class DeadLetter(Resource):
    """A job that failed permanently; `job` is None for a queue entry that could not be parsed."""

    id: str
    at: datetime | None = None
    reason: str
    detail: str
    tenant: str | None = None
    job: Job | None = None


class Scale(Resource):
    """How many workers a namespace wants, and why; a worker takes `start_s` to start. The backlog is in GPU-seconds."""

    namespace: str
    wanted: int
    alive: int
    busy: int
    starting: int = 0
    target_wait_s: float
    oldest_wait_s: float
    backlog_s: float
    start_s: float = 0.0
    queued_s: float = 0.0
    running_s: float = 0.0
    queued: int = 0
    running: int = 0
    reasons: tuple[str, ...] = ()
