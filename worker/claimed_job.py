"""One claimed job on its way through this worker: from the seat it is given to the outcome it is settled with."""

from __future__ import annotations

import asyncio
import time
from enum import StrEnum

from shared.config.models_file import ModelSpec
from shared.errors import FusequeueError
from shared.job import Artifact, Failure, Outcome, Phase, Progress, State, Timings
from shared.queue import Claim
from worker.engine import JobFinished, Output, Pixels
from worker.output.preview_files import PreviewPublisher
from worker.output.upload import Uploader


class StopReason(StrEnum):
    """Why a run ends before its pictures are done."""

    CANCELED = "canceled"
    EXPIRED = "expired"
    LOST = "lost"
    RELEASED = "released"


class ClaimedJob:
    """A claim, how far it has come, and the pictures it is uploading.

    The engine's callbacks arrive on the loop; the worker awaits `engine_done`, then `pictures`.
    """

    def __init__(self, claim: Claim, spec: ModelSpec) -> None:
        self.claim = claim
        self.spec = spec
        self.key = f"{claim.job.id}:{claim.epoch}"
        self.queued_since_s = time.monotonic() - claim.waited_ms / 1000
        self.phase = Phase.LOADING
        self.progress = Progress()
        self.engine_done: asyncio.Future[JobFinished] = asyncio.get_running_loop().create_future()
        self.stop_reason: StopReason | None = None
        self.stopped = asyncio.Event()
        self.in_engine = False
        self._uploads: dict[int, asyncio.Task[Artifact]] = {}
        self._previews: dict[int, list[asyncio.Task[None]]] = {}

    @property
    def occupies_seats(self) -> bool:
        """False once the last forward is under way: its seats may be filled, and are free when it ends."""
        leaving = self.progress.total > 1 and self.progress.step >= self.progress.total - self.claim.job.n
        return not self.engine_done.done() and not leaving

    def advance(self, phase: Phase, progress: Progress | None = None) -> None:
        """Note how far the engine has come."""
        self.phase = phase
        if progress is not None:
            self.progress = progress

    def stop(self, reason: StopReason) -> None:
        """Ask for an early end; the first reason stands."""
        if self.stop_reason is None:
            self.stop_reason = reason
            self.stopped.set()

    def deliver(self, delivery: Uploader, index: int, made: Output) -> None:
        """Start encoding and uploading picture `index`."""
        task = asyncio.create_task(delivery.deliver(self.claim, index, made))
        self._uploads[index] = task

    def preview(self, previews: PreviewPublisher, index: int, pixels: Pixels) -> None:
        """Tell the next preview of picture `index`, once those before it are told: who follows sees them in order."""
        told = self._previews.setdefault(index, [])
        before, number = told[-1:], len(told)

        async def tell() -> None:
            if before:
                await asyncio.wait(before)
            await previews.tell(self.claim.job, index, number, pixels)

        told.append(asyncio.create_task(tell()))

    async def previews_told(self) -> None:
        """Wait until every preview is told or dropped."""
        await asyncio.gather(*(task for told in self._previews.values() for task in told))

    async def pictures(self) -> tuple[Artifact, ...]:
        """Return the uploaded pictures in order; empty when the run was stopped first, whose uploads go on."""
        tasks = [self._uploads[index] for index in sorted(self._uploads)]
        either = {asyncio.ensure_future(self.uploads_ended()), asyncio.ensure_future(self.stopped.wait())}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            return tuple(task.result() for task in tasks) if all(task.done() for task in tasks) else ()
        finally:
            for future in either:
                future.cancel()
            await asyncio.gather(*either, return_exceptions=True)

    async def uploads_ended(self) -> None:
        """Wait until nothing is under way to storage any more."""
        if self._uploads:
            await asyncio.wait(self._uploads.values())

    def abandon(self) -> None:
        """Drop what is still being uploaded."""
        for task in (*self._uploads.values(), *(task for told in self._previews.values() for task in told)):
            task.cancel()

    def outcome(self, finished: JobFinished, artifacts: tuple[Artifact, ...], upload_ms: int | None) -> Outcome:
        """Return what the job is settled with, given how the engine and the uploads ended."""
        timings = Timings(
            queue_ms=self.claim.waited_ms,
            load_ms=finished.load_ms,
            inference_ms=finished.inference_ms,
            upload_ms=upload_ms,
        )
        state, error = State.SUCCEEDED, None
        if self.stop_reason is StopReason.EXPIRED:
            state = State.EXPIRED
            error = Failure(code="deadline_exceeded", message="the deadline passed while the job was running")
        elif self.stop_reason is StopReason.CANCELED:
            state = State.CANCELED
        elif finished.error is not None:
            state, error = State.FAILED, failure(finished.error)
        return Outcome(
            state=state,
            artifacts=artifacts if state is State.SUCCEEDED else (),
            error=error,
            batching=finished.batching,
            timings=timings,
            progress=self.progress,
            gpu_seconds=finished.gpu_seconds,
        )


def failure(error: FusequeueError) -> Failure:
    """Return an error as the job's client is told it."""
    return Failure(code=error.code, message=error.message, param=error.param, retryable=error.retryable)
