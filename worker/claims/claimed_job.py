"""A claimed job on the event loop of its worker: its progress, its uploads, and why it stops."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from enum import StrEnum
from itertools import chain
from typing import Any

import structlog

from shared.config.adapters import AdapterSpec
from shared.config.model_spec import ModelSpec
from shared.errors import without_places
from shared.job import Phase, State
from shared.job_fields import OnDeadline
from shared.job_record import Artifact, Failure, Outcome, Progress, Timings
from shared.queue import Claim
from shared.queue.checkpoints import JobCheckpoint
from shared.runtime.asyncio_tools import cancel_and_wait
from worker.claims.step_times import StepTimes, ran_s, remaining_s, with_report
from worker.engine.outputs import Audio, Latents, Mesh, Output, Pixels
from worker.engine.protocol import EngineRequest, ImageCheckpoint, InputFiles, JobFinished
from worker.metrics.job_trace import JobTimes
from worker.output.image_encoding import PreviewPublisher
from worker.output.upload import Uploader

log = structlog.get_logger()


class StopReason(StrEnum):
    """Why a job stops before its outputs are finished."""

    CANCELED = "canceled"
    EXPIRED = "expired"
    LOST = "lost"
    RELEASED = "released"


class ClaimedJob:
    """A claim with the job's progress and uploads; used on the event loop only."""

    def __init__(self, claim: Claim, spec: ModelSpec) -> None:
        self.claim = claim
        self.job = claim.job
        self.spec = spec
        self.claim_key = claim.key
        self.settle_token = secrets.token_hex(8)
        now_s = time.monotonic()
        self.queued_since_s = now_s - claim.queued_ms / 1000
        stops = claim.time_left_ms is not None and claim.job.on_deadline is OnDeadline.EXPIRE
        self.deadline_at_s = now_s + (claim.time_left_ms or 0) / 1000 if stops else None
        self.start_by_s = None if claim.slack_ms is None else now_s + claim.slack_ms / 1000
        self.times = JobTimes()
        self.phase = Phase.LOADING
        self.progress = Progress()
        self.slots = claim.job.slots  # fewer once candidates are dropped
        self.occupied_slots = self.slots  # at its last change; 0 in its last forward and after
        self.engine_done: asyncio.Future[JobFinished] = asyncio.get_running_loop().create_future()
        self.stop_reason: StopReason | None = None
        self.stopped = asyncio.Event()
        self.resumed_from = JobCheckpoint()
        self.checkpoint = JobCheckpoint()  # the one that the record names
        self.checkpoint_refusal: str | None = None  # why the last one was not stored
        self.checkpoint_fault: str | None = None  # why the engine takes none
        self.waiting_checkpoint: Sequence[ImageCheckpoint | None] | None = None
        self.storing: asyncio.Task[None] | None = None
        self._checkpoints = 0
        self._step_times: StepTimes | None = None
        self._uploads: dict[int, asyncio.Task[Artifact]] = {}
        self._previews: dict[int, list[asyncio.Task[None]]] = {}

    def engine_request(
        self, inputs: InputFiles, adapters: tuple[AdapterSpec, ...], checkpoints: tuple[bytes | None, ...] = ()
    ) -> EngineRequest:
        """Return what the engine is to run; `adapters` are the uploaded ones, as local files."""
        return EngineRequest(
            self.claim_key,
            self.job,
            self.spec,
            inputs,
            self.claim.must_run_solo,
            self.queued_since_s,
            self.start_by_s,
            adapters,
            checkpoints,
            self.spec.checkpoint_s or None,
        )

    def next_checkpoint(self) -> int:
        """Return the number of another checkpoint of this claim."""
        self._checkpoints += 1
        return self._checkpoints

    def ran_s(self, now_s: float) -> float:
        """Return for how long the job has taken steps since its claim."""
        return ran_s(self._step_times, now_s)

    def remaining_s(self, now_s: float) -> float:
        """Return how long the engine needs for the rest of the steps; 0 if that is unknown."""
        return 0.0 if self.engine_done.done() else remaining_s(self._step_times, now_s)

    @property
    def has_checkpoints(self) -> bool:
        """Whether the engine takes checkpoints of the job, as far as it is known."""
        return bool(self.spec.checkpoint_s) and self.checkpoint_fault is None

    @property
    def keeps_steps(self) -> bool:
        """Whether this run has stored a checkpoint beyond its beginning, and its last one too."""
        return self.checkpoint_refusal is None and self.checkpoint.step > self.resumed_from.step

    @property
    def occupies_slots(self) -> bool:
        """False from the start of the job's last denoising forward: its slots are free when that forward ends."""
        in_last_forward = self.progress.total > 1 and self.progress.step >= self.progress.total - self.job.n
        return not self.engine_done.done() and not in_last_forward

    @property
    def engine_result(self) -> JobFinished:
        """How the engine ended the job; without figures if it has not."""
        done = self.engine_done
        finished = done.done() and not done.cancelled() and done.exception() is None
        return done.result() if finished else JobFinished(self.claim_key)

    @property
    def abandoned(self) -> bool:
        """The claim no longer belongs to this worker."""
        return self.stop_reason in (StopReason.LOST, StopReason.RELEASED)

    def update_progress(self, phase: Phase, progress: Progress | None = None) -> None:
        if phase is not self.phase:
            self.times.note_phase(phase)
        self.phase, self.progress = phase, progress or self.progress
        if progress is not None:
            self._step_times = with_report(self._step_times, progress.step, progress.total, time.monotonic())

    def stop(self, reason: StopReason) -> None:
        """Request an early end; the first reason is kept."""
        if self.stop_reason is None:
            self.stop_reason = reason
            self.stopped.set()

    def fail(self, error: Exception) -> None:
        """End the job with an error that has no place in the engine's result."""
        if not self.engine_done.done():
            self.engine_done.set_exception(error)

    def upload(self, uploader: Uploader, index: int, output: Output | Audio | Mesh | Latents) -> None:
        """Start encoding and uploading output `index`."""
        times = self.times.begin_upload(index)
        task = asyncio.create_task(uploader.upload(self.claim, index, output, times.note_encoded))
        task.add_done_callback(times.note_ended)
        self._uploads[index] = task

    def publish_preview(self, publisher: PreviewPublisher, index: int, pixels: Pixels) -> None:
        """Start publishing the next preview of image `index`, in order: after the image's previous preview."""
        tasks = self._previews.setdefault(index, [])
        previous, number = tasks[-1:], len(tasks)

        async def publish() -> None:
            if previous:
                await asyncio.wait(previous)
            try:
                await publisher.publish(self.claim, index, number, pixels)
            except Exception:  # the image follows
                log.exception("preview_failed", job_id=self.job.id)

        tasks.append(asyncio.create_task(publish()))

    async def wait_for_previews(self) -> None:
        """Wait until every preview is published or dropped."""
        await asyncio.gather(*chain.from_iterable(self._previews.values()))

    async def wait_for_artifacts(self) -> tuple[Artifact, ...]:
        """Wait for the uploads and return their artifacts in order; empty when the job is stopped first.

        Raises the first error of an upload.
        """
        tasks = [self._uploads[index] for index in sorted(self._uploads)]
        uploaded = asyncio.ensure_future(self.wait_for_uploads(asyncio.FIRST_EXCEPTION))
        waits: set[asyncio.Future[Any]] = {uploaded, asyncio.ensure_future(self.stopped.wait())}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            done = tuple(task.result() for task in tasks if task.done())
            return done if len(done) == len(tasks) else ()
        finally:
            await cancel_and_wait(waits)

    async def wait_for_uploads(self, return_when: str = asyncio.ALL_COMPLETED) -> None:
        if self._uploads:
            await asyncio.wait(self._uploads.values(), return_when=return_when)

    async def wait_for_checkpoint(self) -> None:
        """Wait until the last checkpoint is stored, or the job is stopped."""
        if self.storing is not None:
            stopped = asyncio.ensure_future(self.stopped.wait())
            try:
                await asyncio.wait({self.storing, stopped}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await cancel_and_wait((stopped,))

    def cancel_uploads(self) -> None:
        if self.storing is not None:
            self.storing.cancel()
        for task in chain(self._uploads.values(), *self._previews.values()):
            task.cancel()

    def outcome(
        self, finished: JobFinished, artifacts: tuple[Artifact, ...] = (), upload_ms: int | None = None
    ) -> Outcome:
        """Return the outcome to settle, from how the engine and the uploads ended."""
        state, error = State.SUCCEEDED, None
        if self.stop_reason is StopReason.EXPIRED:
            state = State.EXPIRED
            error = Failure(code="deadline_exceeded", message="the deadline passed while the job was running")
        elif self.stop_reason is StopReason.CANCELED:
            state = State.CANCELED
        elif finished.error is not None:
            state, cause = State.FAILED, finished.error
            message = without_places(cause.message)
            error = Failure(code=cause.code, message=message, param=cause.param, retryable=cause.retryable)
        return Outcome(
            state=state,
            artifacts=artifacts if state is State.SUCCEEDED else (),
            error=error,
            batching=finished.batching,
            timings=Timings(
                queue_ms=self.claim.queued_ms,
                load_ms=finished.load_ms,
                inference_ms=finished.inference_ms,
                upload_ms=upload_ms,
            ),
            progress=self.progress,
            device_seconds=finished.device_seconds,
            warnings=finished.warnings,
            device_times=None if finished.resumed_steps else finished.device_times,
            resumed_steps=finished.resumed_steps,
        )
