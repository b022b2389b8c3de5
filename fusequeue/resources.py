"""Jobs and other objects of the HTTP API. Unknown fields of a newer service are kept."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from fusequeue.errors import JobFailed

ENDED = frozenset({"succeeded", "failed", "canceled", "expired"})


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow")


class Progress(_Model):
    """Denoising steps done and in total, over all images of a job."""

    step: int = 0
    total: int = 0
    percent: int = 0


class QueuePosition(_Model):
    """Position of a queued job: 0 is next, None is unknown; `reason` is why it waits."""

    position: int | None = None
    eta_s: float | None = None
    reason: str | None = None


class Artifact(_Model):
    """A finished image or video."""

    index: int
    url: str
    content_type: str
    bytes: int
    width: int
    height: int
    seed: int
    flagged: bool = False
    kind: str = "image"
    frames: int | None = None
    fps: int | None = None
    duration_s: float | None = None
    has_audio: bool | None = None
    thumbnail_url: str | None = None


class Failure(_Model):
    """Why a job did not succeed."""

    code: str
    message: str
    param: str | None = None
    retryable: bool = False


class Metrics(_Model):
    """Durations of a job's phases, and its share of the device's time; None if not reached."""

    queue_ms: int | None = None
    load_ms: int | None = None
    inference_ms: int | None = None
    upload_ms: int | None = None
    device_seconds: float | None = None


class BatchingStats(_Model):
    """A job's denoiser forwards and batch mates; `solo_reason` says why it had none."""

    forwards: int = 0
    max_jobs: int = 1
    mean_rows: float = 1.0
    skipped_steps: int = 0
    solo_reason: str | None = None


class Job(_Model):
    """A job: its request, state and results."""

    id: str
    status: str
    phase: str | None = None
    model: str
    prompt: str
    seed: int
    n: int
    width: int
    height: int
    steps: int
    guidance_scale: float
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    progress: Progress = Progress()
    queue: QueuePosition | None = None
    priority: str = "standard"
    metadata: dict[str, str] = Field(default_factory=dict)
    batch_id: str | None = None
    artifacts: tuple[Artifact, ...] = ()
    error: Failure | None = None
    metrics: Metrics = Metrics()
    batching: BatchingStats | None = None

    @property
    def ended(self) -> bool:
        """Whether the state is final."""
        return self.status in ENDED

    def require_success(self) -> Job:
        """Return the job if it succeeded; raises `JobFailed` if it ended otherwise, ValueError if it has not ended."""
        if not self.ended:
            raise ValueError(f"job {self.id} is still {self.status}")
        if self.status != "succeeded":
            raise JobFailed(self)
        return self


class Event(_Model):
    """One message of a job's event stream; `job` is set on the last one."""

    id: str
    status: str
    phase: str | None = None
    progress: Progress = Progress()
    job: Job | None = None


class LineResult(_Model):
    """Result of one job of a bulk submit; `line` counts from 1."""

    line: int
    id: str | None = None
    replayed: bool = False
    url: str | None = None
    error: Failure | None = None


class DeadLetter(_Model):
    """A job that failed permanently; `job` is None for a queue entry that could not be parsed."""

    id: str
    at: datetime | None = None
    reason: str
    detail: str
    job: Job | None = None


class Scale(_Model):
    """How many workers a pool wants, and why; `backlog_s` in GPU-seconds."""

    pool: str
    wanted: int
    alive: int
    busy: int
    starting: int = 0
    target_wait_s: float
    oldest_wait_s: float
    backlog_s: float
    queued: int = 0
    running: int = 0
    reasons: tuple[str, ...] = ()


def event(data: dict[str, Any]) -> Event:
    """Parse an event; the event of an ended job contains the whole job."""
    if data.get("status") in ENDED and "prompt" in data:
        job = Job.model_validate(data)
        return Event(id=job.id, status=job.status, phase=job.phase, progress=job.progress, job=job)
    return Event.model_validate(data)
