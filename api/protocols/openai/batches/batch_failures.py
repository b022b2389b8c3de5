"""Steps of batches that fail: which failures count, and how a batch that fails again and again ends.

A batch is given up in two stages. After the first, no further lines are submitted, and what its jobs have made is
written: a line whose image cannot be read gets an error at once. If that fails as often again, the batch ends with what
is written. A failure at the image of one line gives no batch up: that line fails instead, see `fails_line`.
"""

import json
from dataclasses import dataclass

import structlog

from api.protocols.openai.batches.batch_files import INPUT_LOST, TRIES, BatchContext, BatchWriter, usable
from shared.batch import Batch, BatchError, BatchStatus
from shared.errors import FusequeueError, NotFound, RedisUnavailable, ScriptFailed, StorageUnavailable, Unavailable
from shared.queue.batches import BatchUpdate

log = structlog.get_logger()

LASTING_TRIES = 3
"""The same for what storage refuses, which a repetition does not change. A file that is not found can come back: its
folder may not be mounted yet."""

_FIRST_RETRY_MS = 15_000
_MAX_RETRY_MS = 58_000  # a batch that is due later than in a minute counts as written before its clock was set back


@dataclass(frozen=True)
class StepFailure:
    """A failure as clients may see it; equal ones are counted. `tries` is how many are too many."""

    code: str
    reason: str
    tries: int


def step_failure(error: Exception) -> StepFailure | None:
    """Return what a failed step has against its batch; None for an outage or overload, which ends by itself."""
    if isinstance(error, NotFound):
        return StepFailure(INPUT_LOST.code, INPUT_LOST.message, TRIES)
    if isinstance(error, StorageUnavailable):
        return StepFailure(error.code, error.public, TRIES if error.retryable else LASTING_TRIES)
    if isinstance(error, Unavailable) and not isinstance(error, ScriptFailed):
        return None
    code = error.code if isinstance(error, FusequeueError) else FusequeueError.code
    return StepFailure(code, f"unexpected error: {type(error).__name__}", TRIES)


def retry_ms(failures: int) -> int:
    """Return the time until a step that has failed `failures` times is tried again."""
    return min(_FIRST_RETRY_MS * failures, _MAX_RETRY_MS)


async def record_failure(context: BatchContext, batch: Batch, error: Exception) -> None:
    """Count a failed step of a batch, and give the batch up after too many equal ones without progress."""
    failure = step_failure(error)
    if failure is None or (isinstance(error, NotFound | StorageUnavailable) and not await usable(context.storage)):
        return
    failures = batch.step_failures + 1 if failure.reason == batch.step_failure else 1
    try:
        if failures < failure.tries:
            counted = BatchUpdate({"step_failures": failures, "step_failure": failure.reason})
            await context.queue.batches.commit(batch, counted, retry_ms(failures))
        else:
            log.warning("batch_given_up", batch_id=batch.id, code=failure.code, failures=failures)
            await _give_up(context, batch, BatchError(code=failure.code, message=failure.reason))
    except RedisUnavailable:
        log.warning("batch_failure_not_counted", batch_id=batch.id)


async def _give_up(context: BatchContext, batch: Batch, error: BatchError) -> None:
    if batch.errors:
        await BatchWriter(context, batch).finish(error)
        return
    errors = json.dumps([error.model_dump()])
    if batch.status is BatchStatus.VALIDATING:
        now, status = context.clock.now_ms(), BatchStatus.FAILED.value
        ended = BatchUpdate({"status": status, "failed_at": now, "errors": errors})
        await context.queue.batches.commit(batch, ended, None)
        return
    await context.queue.batches.commit(batch, BatchUpdate({"errors": errors}), 0)
