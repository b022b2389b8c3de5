"""Batches: thousands of requests in a file, and what is to be done next about one. Nothing here asks or waits."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import StrEnum

from pydantic import BaseModel, ConfigDict

from shared.runtime.clock import made_id

MAX_LINES = 50_000
WINDOW_S = 86_400
PIECE_LINES = 500
AHEAD = 5_000
"""Jobs of one batch that wait or run at once: the rest stays in its file, and out of Redis."""

GRACE_MS = 600_000
"""How long after its window a batch waits for jobs that still run, before it ends without them."""

_ORDINAL_BITS = 20  # more than MAX_LINES needs


class BatchStatus(StrEnum):
    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        return self in (BatchStatus.FAILED, BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED)


class BatchError(BaseModel):
    """What is wrong with a file as a whole; `line` counts from 1, None where it is no single line's fault."""

    model_config = ConfigDict(frozen=True)

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True)
class Batch:
    """A batch as it stands.

    Of its `total` lines, blank ones not counted, the first `read` have been taken up: `accepted` became jobs, of which
    `ended` have ended. `stopped` is the number of lines whose jobs have been canceled. The results of the first
    `written` have been written, `succeeded` of them good ones. `read_at` and `written_at` are the offsets in the input
    file at which to go on. `rev` counts the pieces of work done. Times are in milliseconds, None for not yet.
    """

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    output_file_id: str
    error_file_id: str
    base_url: str
    created_at_ms: int
    expires_at_ms: int
    metadata: dict[str, str] = field(default_factory=dict)
    status: BatchStatus = BatchStatus.VALIDATING
    ends_as: BatchStatus = BatchStatus.COMPLETED
    rev: int = 0
    total: int = 0
    read: int = 0
    read_at: int = 0
    accepted: int = 0
    ended: int = 0
    completed: int = 0
    failed: int = 0
    stopped: int = 0
    written: int = 0
    written_at: int = 0
    succeeded: int = 0
    has_output: bool = False
    has_errors: bool = False
    errors: tuple[BatchError, ...] = ()
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None

    @property
    def reach(self) -> int:
        """Lines that may be jobs: also those of a piece that was taken up and came too late to be noted."""
        return min(self.total, self.read + PIECE_LINES)

    @property
    def open(self) -> int:
        """Jobs that have not ended. One that ended before its line was noted counts as none."""
        return max(0, self.accepted - self.ended)


class BatchStep(StrEnum):
    """What a look at a batch comes to."""

    VALIDATE = "validate"
    TAKE_UP = "take_up"
    STOP_JOBS = "stop_jobs"
    CLOSE = "close"
    WRITE = "write"
    WAIT = "wait"
    NOTHING = "nothing"


def next_step(batch: Batch, now_ms: int) -> BatchStep:
    """Return what is to be done next about `batch`."""
    if batch.status.terminal:
        return BatchStep.NOTHING
    if batch.status is BatchStatus.VALIDATING:
        return BatchStep.CLOSE if now_ms >= batch.expires_at_ms else BatchStep.VALIDATE
    if batch.status is BatchStatus.FINALIZING:
        return BatchStep.WRITE
    waits = batch.open > 0 and now_ms < batch.expires_at_ms + GRACE_MS
    if batch.status is BatchStatus.CANCELLING:
        if batch.stopped < batch.reach:
            return BatchStep.STOP_JOBS
        return BatchStep.WAIT if waits else BatchStep.WRITE
    if now_ms < batch.expires_at_ms and batch.read < batch.total:
        return BatchStep.TAKE_UP if batch.open < AHEAD else BatchStep.WAIT
    return BatchStep.WAIT if waits else BatchStep.CLOSE


def job_id(batch: Batch, ordinal: int) -> str:
    """Return the id of the job that line `ordinal` (from 1, blank lines not counted) becomes: always the same one.

    So a line that is taken up again enqueues nothing, and what became of it is found without a list. Ids sort as lines.
    """
    secret = int.from_bytes(hashlib.sha256(batch.id.encode()).digest()[:16], "big")
    rest = (secret & ((1 << (80 - _ORDINAL_BITS)) - 1)) << _ORDINAL_BITS | ordinal
    return made_id("job", batch.created_at_ms, rest)
