"""Takes checkpoints of engine jobs on the engine's thread, and writes their files on another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import structlog

from shared.job import Job
from worker.engine.checkpoints.checkpoint import Checkpoint, Identity
from worker.engine.checkpoints.file_format import write
from worker.engine.checkpoints.identity import identity_of
from worker.engine.checkpoints.trees import NotStorable
from worker.engine.pipelines.loading import LoadedModel
from worker.engine.protocol import CheckpointTaken, ImageCheckpoint
from worker.engine.scheduling.engine_job import EngineJob

log = structlog.get_logger()


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
        self._writer.shutdown(wait=False, cancel_futures=True)

    def take(self, engine_job: EngineJob) -> None:
        """Take the checkpoints of a job's images, and report them once they are written."""
        engine_job.note_checkpoint()
        reason, taken = self._fault(engine_job), list[_Taken | None]()
        for index, record in enumerate(engine_job.records):
            try:
                usable = reason is None and record is not None and not record.replaying
                checkpoint = record.take() if usable and record is not None else None
            except NotStorable as error:
                reason, checkpoint = f"it has {error}", None
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
        if model.resume_key(job) not in model.resume_faults:
            self._check(model, job)
        return model.resume_fault(job)

    def _write(self, event: CheckpointTaken, taken: Sequence[_Taken | None]) -> None:
        images = tuple(None if one is None else _image(one) for one in taken)
        written = CheckpointTaken(event.claim_key, images, event.device_seconds, event.reason)
        self._post(lambda: self._report(written))


def _image(taken: _Taken) -> ImageCheckpoint:
    checkpoint, identity = taken
    return ImageCheckpoint(write(checkpoint, identity), checkpoint.step, checkpoint.total)
