"""Steps of a batch: which one is next, and the job id of each line. Pure decisions, without I/O."""

import hashlib
from enum import StrEnum

from shared.batch import Batch, BatchStatus
from shared.runtime.clock import make_id

MAX_LINES = 50_000
MAX_FILE_LINES = 200_000
"""Lines with the blank ones, which each step reads again."""

WINDOW_S = 86_400
MAX_OPEN_JOBS = 5_000
"""Jobs of one batch in Redis at once; the remaining lines stay in the file."""

GRACE_MS = 600_000
"""Time after the window in which a batch still waits for running jobs."""

_ORDINAL_BITS = 20  # more than MAX_LINES needs


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
