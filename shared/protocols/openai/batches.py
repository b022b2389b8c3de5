"""Batches: up to 50,000 requests in one file. Pure state and decisions, without I/O."""

import hashlib
from enum import StrEnum

from pydantic import BaseModel, ConfigDict

from shared.runtime.clock import make_id

MAX_LINES = 50_000
MAX_FILE_LINES = 200_000
"""Lines with the blank ones, which each step reads again."""

WINDOW_S = 86_400
CHUNK_LINES = 500
MAX_OPEN_JOBS = 5_000
"""Jobs of one batch in Redis at once; the remaining lines stay in the file."""

GRACE_MS = 600_000
"""Time after the window in which a batch still waits for running jobs."""

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
    """Why an input file is rejected or a batch given up; `line` counts from 1, None: the file as a whole."""

    model_config = ConfigDict(frozen=True)

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Batch(BaseModel):
    """State of a batch; times in milliseconds, None: not yet.

    Of `total` non-blank lines, the first `read` were processed: `accepted` became jobs, of which `ended` have ended.
    The jobs of the first `canceled` lines were canceled; of a batch that is given up, only those after `read`. The
    results of the first `written` lines were written, `succeeded` of them successful. `read_offset` and
    `written_offset` are byte offsets in the input file. `rev` counts the committed updates. `signs_urls` if its creator
    needs a key: URLs in the output need none. With `errors`, a batch that runs is given up: its other lines are not
    submitted. Since its last progress, `step_failures` steps have failed for the same reason, `step_failure`.
    `lacks_error_file` if a batch has ended without a line in its error file.
    """

    model_config = ConfigDict(frozen=True)

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    output_file_id: str
    error_file_id: str
    base_url: str
    created_at_ms: int
    expires_at_ms: int
    output_expires_after_s: int | None = None
    signs_urls: bool = False
    metadata: dict[str, str] = {}
    status: BatchStatus = BatchStatus.VALIDATING
    final_status: BatchStatus = BatchStatus.COMPLETED
    rev: int = 0
    total: int = 0
    read: int = 0
    read_offset: int = 0
    accepted: int = 0
    ended: int = 0
    completed: int = 0
    failed: int = 0
    canceled: int = 0
    lacks_error_file: bool = False
    written: int = 0
    written_offset: int = 0
    succeeded: int = 0
    errors: tuple[BatchError, ...] = ()
    step_failures: int = 0
    step_failure: str = ""
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None

    @property
    def possibly_submitted(self) -> int:
        """Lines that can be jobs, including a chunk that was submitted without being committed."""
        return min(self.total, self.read + CHUNK_LINES)

    @property
    def uncanceled(self) -> int:
        """Lines before the next one whose job is to be canceled: a batch that is given up keeps those it has read."""
        return self.canceled if self.status is BatchStatus.CANCELLING else max(self.canceled, self.read)

    @property
    def last_line(self) -> int:
        """The last line that gets a result or an error; those after it were not submitted before it was given up."""
        return self.read if self.errors else self.total

    @property
    def has_output(self) -> bool:
        """Whether an ended batch has an output file."""
        return self.succeeded > 0

    @property
    def has_errors(self) -> bool:
        """Whether an ended batch has an error file: each line has a result or an error, unless it was given up."""
        return self.succeeded < self.total and not self.lacks_error_file

    @property
    def open_jobs(self) -> int:
        """Jobs that have not ended; at least 0, as a job can end before its line is committed."""
        return max(0, self.accepted - self.ended)


class BatchStep(StrEnum):
    VALIDATE = "validate"
    SUBMIT = "submit"
    CANCEL_JOBS = "cancel_jobs"
    FINALIZE = "finalize"
    WRITE = "write"
    WAIT = "wait"
    DONE = "done"


def next_step(batch: Batch, now_ms: int) -> BatchStep:
    if batch.status.terminal:
        return BatchStep.DONE
    if batch.status is BatchStatus.VALIDATING:
        return BatchStep.FINALIZE if now_ms >= batch.expires_at_ms else BatchStep.VALIDATE
    if batch.status is BatchStatus.FINALIZING:
        return BatchStep.WRITE
    jobs_running = batch.open_jobs > 0 and now_ms < batch.expires_at_ms + GRACE_MS
    if (batch.status is BatchStatus.CANCELLING or batch.errors) and batch.uncanceled < batch.possibly_submitted:
        return BatchStep.CANCEL_JOBS
    if batch.status is BatchStatus.CANCELLING:
        return BatchStep.WAIT if jobs_running else BatchStep.WRITE
    if now_ms < batch.expires_at_ms and batch.read < batch.last_line:
        return BatchStep.SUBMIT if batch.open_jobs < MAX_OPEN_JOBS else BatchStep.WAIT
    return BatchStep.WAIT if jobs_running else BatchStep.FINALIZE


def line_job_id(batch: Batch, ordinal: int) -> str:
    """Return the job id of line `ordinal` (from 1, without blank lines).

    The id is deterministic: submitting a line twice enqueues nothing, and the job of a line is found without an index.
    Ids sort like lines.
    """
    secret = int.from_bytes(hashlib.sha256(batch.id.encode()).digest()[:16], "big")
    rest = (secret & ((1 << (80 - _ORDINAL_BITS)) - 1)) << _ORDINAL_BITS | ordinal
    return make_id("job", batch.created_at_ms, rest)
