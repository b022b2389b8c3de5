"""The state of an engine as its worker sees it: models, memory and activity."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shared.job import Job
from shared.signature import shape


@dataclass(frozen=True)
class Activity:
    """Input of the hang detection.

    `since_s` is the time (`time.monotonic()`) of the last progress while `busy`: the end of a forward or of an image
    task's own code, or the start of the work; minus infinity once the engine's thread has died. `loading`: a model
    is loaded and no forward runs. `expected_s` is the usual time of the present forward, None for a new kind.
    """

    busy: bool
    since_s: float
    loading: bool = False
    expected_s: float | None = None


@dataclass(frozen=True)
class ThreadTime:
    """Seconds that the engine's thread had image tasks to run, and that it had none while a job was queued."""

    busy_s: float = 0.0
    idle_while_queued_s: float = 0.0


@dataclass(frozen=True)
class LoadFailure:
    """Why a model's last load failed; `retry_at_s` is the time (`time.monotonic()`) of the next one.

    `permanent`: the model or its files are at fault, not the network, a disk or memory.
    """

    reason: str
    permanent: bool
    retry_at_s: float


@dataclass(frozen=True)
class EngineStatus:
    """State of an engine.

    `models_bytes` is the memory of loaded models, adapters and outputs kept by step caching, out of the device's
    `memory_bytes`. `kept_models` were evicted, and their weights are in CPU memory, `kept_bytes` of it. `load_seconds`
    is the time of each model's last load, from reading its files to its first job; of a kept one, that of its copy.
    `unavailable_models` has the models with a failed last load. `device_uuid` is the GPU's UUID in NVML. `row_limits`
    is how many images memory holds at once, by model and shape, where it ran out. `failure` is why an engine that ended
    did so. `models_limit_bytes` is what loaded models can take, `model_bytes` the size of each as far as it is known.
    `awaits_jobs`: an operator's order waits for the end of running jobs, so no further ones should start.
    """

    device: str
    device_uuid: str | None = None
    memory_bytes: int = 0
    models_bytes: int = 0
    loaded_models: tuple[str, ...] = ()
    kept_models: tuple[str, ...] = ()
    loading_models: tuple[str, ...] = ()
    pinned_models: tuple[str, ...] = ()
    kept_bytes: int = 0
    models_limit_bytes: int = 0
    model_bytes: Mapping[str, int] = field(default_factory=dict)
    awaits_jobs: bool = False
    load_seconds: Mapping[str, float] = field(default_factory=dict)
    unavailable_models: Mapping[str, LoadFailure] = field(default_factory=dict)
    row_limits: Mapping[tuple[str, str], int] = field(default_factory=dict)
    activity: Activity = Activity(busy=False, since_s=0.0)
    thread_time: ThreadTime = ThreadTime()
    failure: str | None = None

    def usable(self, models: Iterable[str]) -> bool:
        """Return whether one of `models` is loaded or can be."""
        return any(model in self.loaded_models or model not in self.unavailable_models for model in models)


def allowed_rows(status: EngineStatus, job: Job, limit: int) -> int:
    """Return how many images like those of `job`, at most `limit`, fit into memory together now."""
    return min(limit, status.row_limits.get((job.model, shape_key(job)), limit))


def shape_key(job: Job) -> str:
    """Return the size of a job's images, as the key of learned times and limits."""
    return shape(job) if job.frames == 1 else f"{shape(job)}x{job.frames}"
