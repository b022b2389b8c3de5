"""Jobs as a client sees them. Fields that a newer service adds are kept as they came."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from fusequeue.errors import JobFailed

ENDED = frozenset({"succeeded", "failed", "canceled", "expired"})


class _Seen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow")


class Progress(_Seen):
    """Denoising steps done of those to do, over all of a job's pictures."""

    step: int = 0
    total: int = 0
    percent: int = 0


class QueuePosition(_Seen):
    """A waiting job's place; position 0 is next, None is not known."""

    position: int | None = None
    eta_s: float | None = None


class Artifact(_Seen):
    """One finished picture or video."""

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


class Failure(_Seen):
    """Why a job did not succeed."""

    code: str
    message: str
    param: str | None = None
    retryable: bool = False


class Metrics(_Seen):
    """Where the time went, in milliseconds; None means not reached."""

    queue_ms: int | None = None
    load_ms: int | None = None
    inference_ms: int | None = None
    upload_ms: int | None = None


class BatchingStats(_Seen):
    """A job's company over its denoiser forwards; `solo_reason` says why it never had any."""

    forwards: int = 0
    max_jobs: int = 1
    mean_rows: float = 1.0
    solo_reason: str | None = None


class Job(_Seen):
    """A job: what was asked for, and what has become of it."""

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
        """Whether nothing will happen to it any more."""
        return self.status in ENDED

    def require_success(self) -> Job:
        """Return the job itself if it succeeded; raise `JobFailed` if it ended otherwise, ValueError if it goes on."""
        if not self.ended:
            raise ValueError(f"job {self.id} is still {self.status}")
        if self.status != "succeeded":
            raise JobFailed(self)
        return self


class Event(_Seen):
    """One message of a job's event stream; `job` is there on the last one."""

    id: str
    status: str
    phase: str | None = None
    progress: Progress = Progress()
    job: Job | None = None


class LineResult(_Seen):
    """What became of one job of a bulk submit; `line` counts from 1 over all of them."""

    line: int
    id: str | None = None
    replayed: bool = False
    url: str | None = None
    error: Failure | None = None


class DeadLetter(_Seen):
    """A job that was given up; `job` is None for an entry of the line that could not be read as one."""

    id: str
    at: datetime | None = None
    reason: str
    detail: str
    job: Job | None = None


class Scale(_Seen):
    """How many workers a pool wants, what that follows from, and why; times and GPU-seconds in seconds."""

    pool: str
    wanted: int
    alive: int
    busy: int
    starting: int = 0
    target_wait_s: float
    oldest_wait_s: float
    backlog_s: float
    waiting: int = 0
    running: int = 0
    reasons: tuple[str, ...] = ()


def event(data: dict[str, Any]) -> Event:
    """Return an event from its JSON; one of a job that has ended carries the whole job."""
    if data.get("status") in ENDED and "prompt" in data:
        job = Job.model_validate(data)
        return Event(id=job.id, status=job.status, phase=job.phase, progress=job.progress, job=job)
    return Event.model_validate(data)
