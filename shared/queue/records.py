"""The queue's values: what is submitted, what is claimed, what Redis knows of a job, and pages of its indexes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from pydantic import TypeAdapter, ValidationError

from shared.errors import InvalidRequest
from shared.job import Job, Phase, State, decode
from shared.job_fields import Priority
from shared.job_record import Artifact, BatchingStats, Failure, FieldWarning, JobRecord, Progress, Timings
from shared.queue.checkpoints import JobCheckpoint
from shared.queue.order.position import QueuePosition
from shared.runtime.clock import id_time_ms

ARTIFACTS = TypeAdapter(tuple[Artifact, ...])
WARNINGS = TypeAdapter(tuple[FieldWarning, ...])
_RESULTS: dict[str, TypeAdapter[Any]] = {
    "artifacts": ARTIFACTS,
    "error": TypeAdapter(Failure),
    "batching": TypeAdapter(BatchingStats),
    "timings": TypeAdapter(Timings),
    "warnings": WARNINGS,
}
RANKS = tuple(Priority)
"""Priorities by rank: 0, 1, 2 in the scripts."""


Fields: TypeAlias = Sequence[str] | dict[str, str]
"""A hash, or the fields of a stream entry: a flat list from Redis, a dict from redis-py."""


@dataclass(frozen=True)
class Submission:
    """A job to be queued.

    `window_ms` is how long it can wait for batch mates; `max_batch` slots make its signature ready at once, or fewer
    when the workers have learned efficient rows. `fingerprint` identifies the body sent with `idempotency_key`.
    `sync_call` is the digest of a request that waits for the job, by which its retry finds it.
    """

    job: Job
    signature: str
    window_ms: int
    max_batch: int
    idempotency_key: str | None = None
    fingerprint: str | None = None
    sync_call: str | None = None


@dataclass(frozen=True)
class Claim:
    """A job claimed by a worker until its lease ends.

    `epoch`, the fencing token, counts all claims of the job from 1, so that object keys made with it never collide. A
    lost job must run solo, without batch mates. `time_left_ms` is the time from the claim to
    its deadline, `slack_ms` that to its latest start. The job continues from its `checkpoint`, if it has one.
    """

    job: Job
    signature: str
    epoch: int
    must_run_solo: bool
    queued_ms: int
    time_left_ms: int | None = None
    slack_ms: int | None = None
    checkpoint: JobCheckpoint | None = None

    @property
    def key(self) -> str:
        """Identifies the claim on its worker."""
        return f"{self.job.id}:{self.epoch}"


@dataclass(frozen=True)
class Renewal:
    """Reply to a renewal: jobs that are no longer this worker's, jobs to cancel, and others to pause."""

    lost: frozenset[str]
    cancel: frozenset[str]
    pause: frozenset[str] = frozenset()


@dataclass(frozen=True)
class SubmitResult:
    """The queued job of a submission; when `replayed`, that of the first one with its Idempotency-Key.

    A replayed job can have been deleted since. `position` and `deadline_at_ms` are those of a new job, if its position
    was asked for.
    """

    job_id: str
    replayed: bool
    position: QueuePosition | None = field(default=None, compare=False)
    deadline_at_ms: int | None = field(default=None, compare=False)


@dataclass(frozen=True)
class QueueDepth:
    """Queued and running jobs of one signature; `eta_s` until all have ended, None if unknown.

    `waiting_ms` is the age of the oldest interactive or standard job that no quota holds back, `bulk_age_ms` that of
    the oldest bulk job. Checkpoints spare as much work as `spared_slots` of the queued ones have.
    """

    signature: str
    model: str
    jobs: dict[Priority, int]
    slots: dict[Priority, int]
    running_jobs: int
    oldest_age_ms: int | None
    eta_s: float | None
    waiting_ms: int | None = None
    bulk_age_ms: int | None = None
    paused: bool = False
    spared_slots: Mapping[Priority, float] = field(default_factory=dict)

    @property
    def queued_jobs(self) -> int:
        return sum(self.jobs.values())

    @property
    def queued_slots(self) -> int:
        return sum(self.slots.values())


@dataclass(frozen=True)
class ModelDepth:
    """Queued and running jobs of one model, over all its signatures."""

    model: str
    jobs: dict[Priority, int]
    slots: dict[Priority, int]
    running_jobs: int
    signatures: int

    @property
    def queued_slots(self) -> int:
        return sum(self.slots.values())


@dataclass(frozen=True)
class QueueLoad:
    """All queued and running jobs by model, and the signatures with the longest queues and the oldest jobs."""

    models: Sequence[ModelDepth]
    depths: Sequence[QueueDepth]


@dataclass(frozen=True)
class UnavailableModel:
    """Why a worker cannot load a model, and the time from the heartbeat to its next try.

    `permanent`: the model or its files are at fault, so its jobs fail unless another worker may serve it.
    """

    reason: str
    permanent: bool
    retry_in_s: float


@dataclass(frozen=True)
class WorkerInfo:
    """State of a worker at its last heartbeat; the queue sets `beat_at_ms` in Redis time.

    It is `unavailable` while it can load none of its models. `ready_s` is the time since it is ready, None before.
    `bulk_jobs` of its `running_jobs` are bulk.
    Of its `models`, `loaded` ones are in device memory, `kept` ones in CPU memory; `pinned` ones are never evicted.
    `model_bytes` is the size of models whose files it has read, `models_limit_bytes` what all loaded ones can take.
    `models_fault` is why a changed models file is not in use: the models before the change are served.
    `running_slots` are images in the engine or about to enter it. `forwards` counts denoiser forwards since the start,
    `forward_rows` their images. `busy_s` is the GPU thread's time with work, `idle_while_queued_s` without work while a
    job was queued that it then claimed.
    """

    id: str
    models: tuple[str, ...]
    state: Literal["starting", "ready", "unavailable", "draining"] = "ready"
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
    model_bytes: dict[str, int] = field(default_factory=dict)
    unavailable: dict[str, UnavailableModel] = field(default_factory=dict)
    models_fault: str | None = None
    host: str = ""
    pid: int = 0
    version: str = ""
    ready_s: float | None = None
    forwards: int = 0
    forward_rows: int = 0
    busy_s: float = 0.0
    idle_while_queued_s: float = 0.0
    beat_at_ms: int = 0

    def serves(self, model: str) -> bool:
        """Return whether the worker claims jobs of `model` now."""
        return self.state == "ready" and model in self.models and model not in self.unavailable

    def state_of(self, model: str) -> str:
        """Return the worker's state as far as one of its models is concerned."""
        return "unavailable" if self.state == "ready" and model in self.unavailable else self.state

    def memory_state(self, model: str) -> Literal["loaded", "loading", "kept", "failed", "not_loaded"]:
        """Return where one of its models is: in device memory, on the way there, in CPU memory, or nowhere."""
        if model in self.loaded:
            return "loaded"
        if model in self.unavailable:
            return "failed"
        if model in self.loading:
            return "loading"
        return "kept" if model in self.kept else "not_loaded"

    def may_serve(self, model: str) -> bool:
        """Return whether the worker serves `model`, or may do so later: it starts, or a load is to be repeated."""
        failure = self.unavailable.get(model)
        return self.state != "draining" and model in self.models and not (failure and failure.permanent)


@dataclass(frozen=True)
class CostCurve:
    """Seconds of a forward and of the own code after it, by its rows, on one device for one shape of a model."""

    device: str
    model: str
    shape: str
    seconds: dict[int, float]
    measured_at_ms: int


@dataclass(frozen=True)
class DeadLetter:
    """A job that failed permanently, or a lane entry without a job (`record` is None)."""

    id: str
    at_ms: int
    reason: str
    detail: str
    record: JobRecord | None


@dataclass(frozen=True)
class ExpiredItem:
    """An item whose retention has ended: delete all objects below `prefix`, then call `forget_item`."""

    kind: Literal["job", "checkpoint", "input", "file", "adapter"]
    tenant: str
    id: str
    prefix: str
    row: str


@dataclass(frozen=True)
class ProgressReport:
    """Progress of a running job, published to subscribers and, with `store`, written to its record."""

    job_id: str
    epoch: int
    phase: Phase
    progress: Progress
    store: bool = True


@dataclass(frozen=True)
class JobEvent:
    """A state change or progress of a job. `id` orders state changes; progress has the id of the last one."""

    id: str
    job_id: str
    tenant: str
    kind: Literal["state", "progress"]
    state: State | None = None
    phase: Phase | None = None
    progress: Progress | None = None


def record(fields: Mapping[str, str]) -> JobRecord | None:
    """Return the record in a job's hash; None if it is missing or unreadable."""
    if "job" not in fields:
        return None
    plain = ("state", "phase", "attempts", "losses", "epoch", "worker", "device_seconds")
    times = ("deadline", "started", "finished", "expires", "paused")
    try:
        return JobRecord.model_validate(
            {
                **{name: fields[name] for name in plain if fields.get(name)},
                **{f"{name}_at_ms": fields[name] for name in times if name in fields},
                **{name: kind.validate_json(fields[name]) for name, kind in _RESULTS.items() if name in fields},
                "job": decode(fields["job"]),
                "progress": {name: fields[name] for name in ("step", "total") if name in fields},
                "resumed_steps": fields.get("resumed", 0),
                "cancel_requested": "cancel" in fields,
                "event_id": fields.get("event", "0-0"),
                "waits": "wait_until" in fields,
            }
        )
    except ValidationError:
        return None


def paired(flat: Fields) -> dict[str, str]:
    """Return fields as a dict."""
    return flat if isinstance(flat, dict) else dict(zip(flat[::2], flat[1::2], strict=True))


async def start_after(redis: Any, index: str, after: str, *, newest_first: bool = True) -> int:
    """Return the rank that follows the item with the id `after`; for a deleted one, it follows from the id's time.

    Raises `InvalidRequest` for an id without a time.
    """
    rank = await (redis.zrevrank if newest_first else redis.zrank)(index, after)
    if rank is not None:
        return int(rank) + 1
    at_ms = id_time_ms(after)
    if at_ms is None:
        raise no_cursor()
    return await _rank(redis, index, at_ms, after, newest_first)


async def page_after(
    redis: Any, index: str, after: str | None, limit: int, *, newest_first: bool = True
) -> tuple[list[tuple[str, str]], str | None]:
    """Return up to `limit` members, each with the cursor after it, and the cursor of the next page, if there is one."""
    start = 0
    if after is not None:
        at, _, member = after.partition(":")
        if not at.isdecimal() or len(at) > len(str(2**53)) or not member:
            raise no_cursor()
        start = await _rank(redis, index, int(at), member, newest_first)
    rows = await redis.zrange(index, start, start + limit, desc=newest_first, withscores=True)
    page = [(str(member), f"{score:.0f}:{member}") for member, score in rows[:limit]]
    return page, page[-1][1] if len(rows) > limit else None


def no_cursor() -> InvalidRequest:
    return InvalidRequest("after: not a cursor of this list; pass the `next_cursor` of a page", param="after")


async def _rank(redis: Any, index: str, score: int, member: str, newest_first: bool) -> int:
    """Return the rank that follows a member, which can be deleted. Thousands can have the same score."""
    low = int(await redis.zcount(index, "-inf", f"({score}"))
    high = low + int(await redis.zcount(index, score, score))
    while low < high:  # equal scores are ordered by member
        middle = (low + high) // 2
        found = await redis.zrange(index, middle, middle)
        if found and (found[0] < member or (found[0] == member and not newest_first)):
            low = middle + 1
        else:
            high = middle
    return int(await redis.zcard(index)) - low if newest_first else low
