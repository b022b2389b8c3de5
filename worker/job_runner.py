"""What this worker does for one claimed job: fetch its inputs, seat it, upload its pictures, settle it."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import TypeVar

import structlog

from shared.config.models_file import ModelSpec
from shared.errors import FusequeueError, NotFound, Unavailable
from shared.job import Artifact, Failure, Outcome, Phase, Progress, State, Timings
from shared.queue import Claim, Queue
from shared.storage import Storage
from worker.engine import EngineInterface, EngineRequest, InputFiles, JobFinished, Output, Pixels
from worker.metrics import collectors
from worker.output.images import PreviewPublisher
from worker.output.upload import Uploader, attempt_prefix

log = structlog.get_logger()

T = TypeVar("T")

FIRST_RETRY_S = 0.1
LONGEST_RETRY_S = 5.0
LEFTOVERS_S = 15.0  # a little longer than one request to the storage may take


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
        self.queued_since_s = time.monotonic() - claim.queued_ms / 1000
        self.phase = Phase.LOADING
        self.progress = Progress()
        self.engine_done: asyncio.Future[JobFinished] = asyncio.get_running_loop().create_future()
        self.stop_reason: StopReason | None = None
        self.stopped = asyncio.Event()
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
            queue_ms=self.claim.queued_ms,
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


class _InputMissing(Exception):
    def __init__(self, param: str) -> None:
        super().__init__(param)
        self.param = param


class JobRunner:
    """Sees one run through, from its claim to its settling."""

    def __init__(self, queue: Queue, storage: Storage, engine: EngineInterface, worker: str) -> None:
        self._queue = queue
        self._storage = storage
        self._engine = engine
        self._worker = worker

    async def serve(self, run: ClaimedJob) -> None:
        """Make the job's pictures and settle it, unless it stops being this worker's on the way."""
        try:
            outcome = await self._make(run)
            if run.stop_reason in (StopReason.LOST, StopReason.RELEASED):
                log.info("job_given_up", job_id=run.claim.job.id, reason=run.stop_reason.value)
                collectors.given_up(run.stop_reason.value)
                settled = False
            else:
                settled = await self._settle(run, outcome)
                self._tell(run, outcome, settled)
            if not settled:
                await self._remove_leftovers(run)
        finally:
            run.abandon()

    async def _settle(self, run: ClaimedJob, outcome: Outcome) -> bool:
        job_id, epoch, token = run.claim.job.id, run.claim.epoch, secrets.token_hex(8)
        return bool(
            await self._patiently(
                run, lambda: self._queue.claims.settle(self._worker, job_id, epoch, outcome, token=token)
            )
        )

    async def _remove_leftovers(self, run: ClaimedJob) -> None:
        """Remove what was uploaded for a claim that is somebody else's by now; the job may have been deleted since.

        Where storage or Redis is away it stays until the job's retention ends.
        """
        claim = run.claim
        try:
            async with asyncio.timeout(LEFTOVERS_S):
                await run.uploads_ended()
                record = await self._queue.jobs.get(claim.job.id)
                # Of the same epoch, the job is given back, or settled after all: its pictures may be told already.
                if record is None or record.epoch != claim.epoch:
                    await self._storage.delete_prefix(attempt_prefix(claim.job, claim.attempt))
        except (Unavailable, TimeoutError) as error:
            log.warning("leftovers_not_removed", job_id=claim.job.id, error=str(error))

    async def _make(self, run: ClaimedJob) -> Outcome:
        try:
            inputs = await self._inputs(run)
        except _InputMissing as missing:
            return Outcome(
                state=State.FAILED,
                error=Failure(code="input_missing", message="the input image is no longer stored", param=missing.param),
                timings=Timings(queue_ms=run.claim.queued_ms),
            )
        if run.stop_reason is not None:
            return run.outcome(JobFinished(), (), None)
        self._engine.submit(EngineRequest(run.key, run.claim.job, run.spec, inputs, run.claim.solo, run.queued_since_s))
        finished = await run.engine_done
        if finished.error is not None or run.stop_reason is not None:
            return run.outcome(finished, (), None)
        started = time.monotonic()
        # The result is in storage before the state says so: a visible result is a whole one.
        artifacts = await run.pictures()
        await run.previews_told()  # whoever sees the end finds all of them
        return run.outcome(finished, artifacts, round(1000 * (time.monotonic() - started)))

    async def _inputs(self, run: ClaimedJob) -> InputFiles:
        """Fetch the job's input pictures; none when the run is stopped first."""
        job = run.claim.job
        files = {name: await self._fetched(run, name, ref.key) for name, ref in job.inputs.items()}
        return InputFiles(
            images=tuple(data or b"" for name, data in files.items() if name.partition(".")[0] in ("image", "images")),
            mask=files.get("mask"),
            last_image=files.get("last_image"),
        )

    async def _fetched(self, run: ClaimedJob, name: str, key: str) -> bytes | None:
        try:
            return await self._patiently(run, lambda: self._storage.read(key), until_stopped=True)
        except NotFound:
            raise _InputMissing(name) from None

    async def _patiently(
        self, run: ClaimedJob, action: Callable[[], Awaitable[T]], *, until_stopped: bool = False
    ) -> T | None:
        """Repeat `action` while something outside is away, until the run is not ours any more; then return None.

        `until_stopped`: until it is stopped for whatever reason.
        """
        ceiling = FIRST_RETRY_S
        while True:
            try:
                return await action()
            except Unavailable as error:
                log.warning("job_waits", job_id=run.claim.job.id, code=error.code, error=error.message)
            if run.stop_reason in (StopReason.LOST, StopReason.RELEASED) or (until_stopped and run.stop_reason):
                return None
            await asyncio.sleep(random.uniform(ceiling / 2, ceiling))
            ceiling = min(2 * ceiling, LONGEST_RETRY_S)

    def _tell(self, run: ClaimedJob, outcome: Outcome, settled: bool) -> None:
        """Write the one log line of a job, and count it."""
        if settled:
            collectors.settled(run.claim, outcome)
        else:
            collectors.given_up(StopReason.LOST.value)
        log.info(
            "job" if settled else "job_lost_before_settle",
            job_id=run.claim.job.id,
            signature=run.claim.signature,
            state=outcome.state.value,
            jobs_fused=outcome.batching.max_jobs,
            mean_rows=outcome.batching.mean_rows,
            solo_reason=outcome.batching.solo_reason,
            wait_ms=outcome.timings.queue_ms,
            inference_ms=outcome.timings.inference_ms,
            upload_ms=outcome.timings.upload_ms,
            error=outcome.error.code if outcome.error else None,
        )
