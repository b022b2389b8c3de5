"""Takes checkpoints of engine jobs on the engine's thread, and writes their files on another one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

import structlog

from shared.job import Job
from worker.engine import thread_pools
from worker.engine.checkpoints.checkpoint import Checkpoint, Identity
from worker.engine.checkpoints.file_format import of_dropped, write
from worker.engine.checkpoints.identity import identity_of
from worker.engine.checkpoints.task_record import TaskRecord
from worker.engine.checkpoints.trees import NotStorable
from worker.engine.errors import as_job_error, text_of
from worker.engine.pipelines.loaded_model import LoadedModel
from worker.engine.protocol import CheckpointTaken, ImageCheckpoint
from worker.engine.scheduling.engine_job import EngineJob

log = structlog.get_logger()

RECHECK_S = 60.0
"""Until a check for which there was no memory is tried again: it makes two sample images."""


class _Taken(NamedTuple):
    checkpoint: Checkpoint
    identity: Identity


class JobCheckpoints:
    """`report` gets the event of each job, on the engine's thread, to which `post` brings it.

    `check` finds out whether jobs like one can continue, before the first checkpoint of a model.
    """

    def __init__(
        self,
        post: Callable[[Callable[[], None]], None],
        report: Callable[[CheckpointTaken], None],
        check: Callable[[LoadedModel, Job], None],
    ) -> None:
        self._post = post
        self._report = report
        self._check = check
        self._writer = ThreadPoolExecutor(1, "checkpoint-writer")

    def close(self) -> None:
        thread_pools.end(self._writer)

    def take(self, engine_job: EngineJob) -> None:
        """Take the checkpoints of a job's images, and report them once they are written."""
        engine_job.note_checkpoint()
        reason, taken = self._fault(engine_job), list[_Taken | None]()
        for index in range(len(engine_job.tasks)):
            checkpoint = None if reason is not None else _of(engine_job, index)
            if isinstance(checkpoint, str):
                reason, checkpoint = checkpoint, None
            if checkpoint is None or engine_job.model is None:
                taken.append(None)
                continue
            identity = identity_of(engine_job.model.fingerprint, engine_job.job, index, engine_job.model.device)
            taken.append(_Taken(checkpoint, identity))
        if reason is not None:
            log.info("no_checkpoint", job_id=engine_job.job.id, model=engine_job.spec.id, reason=reason)
        event = CheckpointTaken(engine_job.claim_key, (), engine_job.device_seconds, reason)
        self._writer.submit(self._write, event, taken)

    def _fault(self, engine_job: EngineJob) -> str | None:
        """Return why a job can have no checkpoint, None if it can."""
        model, job = engine_job.model, engine_job.job
        if engine_job.checkpoint_fault is not None or model is None:
            return engine_job.checkpoint_fault
        key = model.resume_key(job)
        if key not in model.resume_faults and time.monotonic() >= model.resume_rechecks_s.get(key, 0.0):
            self._check(model, job)
            model.resume_rechecks_s[key] = time.monotonic() + RECHECK_S
        fault = model.resume_fault(job)
        if fault is None and key not in model.resume_faults:
            return "there is no memory for the check of its checkpoints"
        return fault

    def _write(self, event: CheckpointTaken, taken: Sequence[_Taken | None]) -> None:
        try:
            images = tuple(None if one is None else _image(one) for one in taken)
            written = CheckpointTaken(event.claim_key, images, event.device_seconds, event.reason)
        except Exception as error:  # the top of a thread: the worker waits for the event
            log.exception("checkpoint_not_written", claim_key=event.claim_key)
            reason = f"its checkpoint cannot be written: {type(error).__name__}: {text_of(error)[:200]}"
            written = CheckpointTaken(event.claim_key, (), event.device_seconds, reason)
        self._post(lambda: self._report(written))


def _of(engine_job: EngineJob, index: int) -> Checkpoint | str | None:
    """Return the checkpoint of an image, None if there is nothing newer, or why it cannot be taken.

    Those of candidates are all of the present marks: also of one that replays, or was dropped.
    """
    record, candidates = engine_job.records[index], engine_job.candidates
    if record is None:
        return None
    if candidates is None:
        return _newest(record)
    dropped_after = candidates.state.dropped_steps.get(index)
    if dropped_after is not None:
        return of_dropped(dropped_after, candidates.state)
    taken = record.replayed or _newest(record)
    return replace(taken, marks=candidates.state) if isinstance(taken, Checkpoint) else taken


def _newest(record: TaskRecord) -> Checkpoint | str | None:
    try:
        return None if record.replaying else record.take()
    except NotStorable as error:
        return f"it has {error}"
    except Exception as error:  # a pipeline can keep anything
        failure = as_job_error(error)
        log.warning("checkpoint_not_taken", exc_info=error)
        return f"its checkpoint cannot be taken: {failure.message}"


def _image(taken: _Taken) -> ImageCheckpoint:
    checkpoint, identity = taken
    return ImageCheckpoint(write(checkpoint, identity), checkpoint.step, checkpoint.total)
