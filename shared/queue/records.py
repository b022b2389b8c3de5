"""The queue's values: what is submitted, what is claimed, and what Redis knows of a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from shared.job import (
    Artifact,
    BatchingStats,
    Failure,
    Job,
    JobRecord,
    Phase,
    Priority,
    Progress,
    State,
    Timings,
    decode,
)

Part = TypeVar("Part", bound=BaseModel)
ARTIFACTS = TypeAdapter(tuple[Artifact, ...])
RANKS = tuple(Priority)
"""Priorities by rank: the scripts know them as 0, 1, 2."""


@dataclass(frozen=True)
class Submission:
    """A job to put in line.

    `window_ms` is how long it may wait for company; `max_batch` the seats that make its signature ripe at once, unless
    the workers have learned that fewer pay. `fingerprint` is of the raw body that came with `idempotency_key`.
    """

    job: Job
    signature: str
    window_ms: int
    max_batch: int
    idempotency_key: str | None = None
    fingerprint: str | None = None


@dataclass(frozen=True)
class Submitted:
    """A job in line; `job_id` is that of the first submission when this one only repeats it."""

    job_id: str
    replayed: bool


@dataclass(frozen=True)
class Claim:
    """A job in this worker's hands until its lease ends.

    `attempt` counts every claim from 1, so that object keys made of it never collide. `alone`: it was lost once and
    is to run without company.
    """

    job: Job
    signature: str
    epoch: int
    attempt: int
    solo: bool
    queued_ms: int


@dataclass(frozen=True)
class Renewal:
    """What a worker is told when it renews: jobs that are not its own any more, and jobs to stop."""

    lost: frozenset[str]
    cancel: frozenset[str]


@dataclass(frozen=True)
class QueuePosition:
    """Where a waiting job stands among its signature's: 0 is next. `eta_s` estimates its end; None: not known."""

    position: int
    eta_s: float | None


@dataclass(frozen=True)
class QueueDepth:
    """What waits and runs of one signature. `eta_s` estimates when the line as it stands is done; None: not known."""

    signature: str
    model: str
    jobs: dict[Priority, int]
    slots: dict[Priority, int]
    running_jobs: int
    oldest_age_ms: int | None
    eta_s: float | None

    @property
    def queued_jobs(self) -> int:
        return sum(self.jobs.values())

    @property
    def queued_slots(self) -> int:
        return sum(self.slots.values())


@dataclass(frozen=True)
class WorkerInfo:
    """What a worker tells of itself at each heartbeat. `beat_at_ms` is set by the queue, by Redis time.

    `ready_at_ms` is when it had loaded its models, 0 until then. `running` are jobs, `running_slots` their pictures in
    the engine or on their way into it. `memory_bytes` is what its device has, `models_bytes` what its models take.

    `forwards` counts denoiser forwards since the start, `forward_rows` the pictures in them, each counted in each;
    `busy_s` is for how long its GPU thread had pictures to go on with, `idle_while_queued_s` for how long it had none
    while jobs that it then got stood in line.
    """

    id: str
    models: tuple[str, ...]
    state: Literal["starting", "ready", "draining"] = "ready"
    slots: int = 0
    free_slots: int = 0
    running_jobs: int = 0
    running_slots: int = 0
    device: str = ""
    memory_bytes: int = 0
    models_bytes: int = 0
    loaded: tuple[str, ...] = ()
    host: str = ""
    pid: int = 0
    version: str = ""
    started_at_ms: int = 0
    ready_at_ms: int = 0
    forwards: int = 0
    forward_rows: int = 0
    busy_s: float = 0.0
    idle_while_queued_s: float = 0.0
    beat_at_ms: int = 0


@dataclass(frozen=True)
class DeadLetter:
    """A job that was given up, or an entry that stood for none (`record` is None)."""

    id: str
    at_ms: int
    reason: str
    detail: str
    record: JobRecord | None


@dataclass(frozen=True)
class ExpiredItem:
    """Something whose time is over: remove all below `prefix` in storage, then hand it to `retained`."""

    kind: Literal["job", "input", "file"]
    tenant: str
    id: str
    prefix: str
    row: str


@dataclass(frozen=True)
class ProgressReport:
    """How far a running job is. It is told to all who listen; `store`: and written to its record."""

    job_id: str
    epoch: int
    phase: Phase
    progress: Progress
    store: bool = True


@dataclass(frozen=True)
class JobEvent:
    """A change of a job's state, or progress within one. `id` orders a job's changes; progress bears the last one's."""

    id: str
    job_id: str
    tenant: str
    kind: Literal["state", "progress"]
    state: State | None = None
    phase: Phase | None = None
    progress: Progress | None = None


def record(fields: Mapping[str, str]) -> JobRecord | None:
    """Return what a job's hash tells; None when there is none, or when it cannot be read as one of ours."""
    if "job" not in fields:
        return None
    try:
        return _record(fields)
    except ValidationError:
        return None


def paired(flat: Sequence[str]) -> dict[str, str]:
    """Return the fields of a hash that a script answered as a flat list."""
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _record(fields: Mapping[str, str]) -> JobRecord:
    return JobRecord(
        job=decode(fields["job"]),
        state=State(fields["state"]),
        phase=Phase(fields["phase"]) if fields.get("phase") else None,
        progress=Progress(step=int(fields.get("step", 0)), total=int(fields.get("total", 0))),
        attempts=int(fields.get("attempts", 0)),
        losses=int(fields.get("losses", 0)),
        epoch=int(fields.get("epoch", 0)),
        worker=fields.get("worker"),
        cancel_requested="cancel" in fields,
        started_at_ms=_number(fields, "started"),
        finished_at_ms=_number(fields, "finished"),
        expires_at_ms=_number(fields, "expires"),
        artifacts=ARTIFACTS.validate_json(fields.get("artifacts", "[]")),
        error=_part(Failure, fields.get("error")),
        batching=_part(BatchingStats, fields.get("batching")),
        timings=_part(Timings, fields.get("timings")) or Timings(),
        event_id=fields.get("event", "0-0"),
    )


def _number(fields: Mapping[str, str], name: str) -> int | None:
    return int(fields[name]) if name in fields else None


def _part(kind: type[Part], wire: str | None) -> Part | None:
    return None if wire is None else kind.model_validate_json(wire)
