"""Run one claimed job: fetch its inputs, hand it to the engine, upload its outputs, settle it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial

import structlog
from structlog.contextvars import bind_contextvars

from shared.artifact_ref import ArtifactRef
from shared.errors import JobError, NotFound, StorageRefused, Unavailable, UnexpectedError, without_places
from shared.job import State
from shared.job_record import Failure, Outcome, Timings
from shared.queue import Claim, Queue
from shared.runtime import metrics
from shared.runtime.asyncio_tools import retry_while_unavailable
from shared.storage import Storage
from worker.adapter_folder import AdapterFolder
from worker.claims.checkpoint_store import CheckpointStore
from worker.claims.claimed_job import ClaimedJob, StopReason
from worker.engine.protocol import EngineInterface, InputFiles, JobFinished
from worker.metrics import collectors
from worker.metrics.job_trace import JobSpans
from worker.model_availability import ModelAvailability
from worker.output.upload import claim_prefix

log = structlog.get_logger()

SETTLE_FAILED_S = 60.0
CLEANUP_TIMEOUT_S = 15.0  # a little longer than one storage request can take


class JobRunner:
    """Runs claimed jobs, each in a separate asyncio task."""

    def __init__(
        self,
        queue: Queue,
        storage: Storage,
        adapters: AdapterFolder,
        engine: EngineInterface,
        availability: ModelAvailability,
        checkpoints: CheckpointStore,
    ) -> None:
        self._queue = queue
        self._storage = storage
        self._adapters = adapters
        self._engine = engine
        self._availability = availability
        self._worker = checkpoints.worker
        self._checkpoints = checkpoints

    async def run(self, claimed: ClaimedJob) -> None:
        """Generate the job's outputs and settle it, unless its claim is lost or released meanwhile."""
        trace = claimed.job.trace
        ids = {"job_id": claimed.job.id} | ({} if trace is None else {"trace_id": trace.trace_id})
        bind_contextvars(**ids)  # for every log event of this task
        outcome: Outcome | None = None
        ended_as: str | None = None
        try:
            outcome = await self._outcome(claimed)
            if claimed.stop_reason is None and await self._gives_back(claimed, outcome):
                await self._release(claimed)
            if claimed.abandoned:
                log.info("claim_abandoned", reason=claimed.stop_reason)
                metrics.claims_abandoned.labels(claimed.stop_reason).inc()
            elif await self._settle(claimed, outcome):
                ended_as = outcome.state.value
                return
            await self._count_run(claimed, outcome)
            await self._remove_uploads(claimed)
        except Exception as error:
            if claimed.abandoned:
                raise
            await self.fail(claimed.claim, error)
            ended_as = State.FAILED.value
        finally:
            claimed.cancel_uploads()
            # A renewal beside `settle` finds the claim of a settled job gone.
            stopped_as = StopReason.RELEASED if claimed.stop_reason is StopReason.RELEASED else StopReason.LOST
            ended_as = ended_as or stopped_as.value
            JobSpans(claimed.claim, claimed.times, outcome, ended_as, self._worker).record()

    async def _gives_back(self, claimed: ClaimedJob, outcome: Outcome) -> bool:
        """Return whether another run can succeed: the model cannot be loaded now, or the engine ended the job at the
        request of a drain or a pause, or of an earlier run with the same epoch: a failover of Redis can give it out
        twice."""
        result = claimed.engine_result
        canceled = result.canceled and outcome.state is State.SUCCEEDED
        return canceled or await self._availability.gives_back(claimed.job.model, result.error)

    async def fail(self, claim: Claim, error: Exception) -> None:
        """Settle a job that an unexpected error ended, so that it does not wait for its lease to expire."""
        log.error("job_runner_failed", job_id=claim.job.id, exc_info=error)
        cause = UnexpectedError(error)
        failure = Failure(code=cause.code, message=without_places(cause.message))
        outcome = Outcome(state=State.FAILED, error=failure, timings=Timings(queue_ms=claim.queued_ms))
        async with asyncio.timeout(SETTLE_FAILED_S):
            settle = partial(self._queue.claims.settle, self._worker, claim.job.id, claim.epoch, outcome, job=claim.job)
            if await retry_while_unavailable(settle, "settle_failed"):
                collectors.settled(claim, outcome)

    async def _outcome(self, claimed: ClaimedJob) -> Outcome:
        """Generate the job's outputs; any error becomes the job's."""
        try:
            return await self._generate(claimed)
        except JobError as error:
            cause = error
        except Exception as error:
            log.exception("job_failed_unexpectedly")
            cause = UnexpectedError(error)
        self._engine.cancel(claimed.claim_key)
        return claimed.outcome(replace(claimed.engine_result, error=cause))

    async def _generate(self, claimed: ClaimedJob) -> Outcome:
        inputs = await self._fetch_inputs(claimed)
        if claimed.stop_reason is not None:
            return claimed.outcome(JobFinished(claimed.claim_key))
        checkpoints = await self._checkpoints.read(claimed)
        async with self._adapters.held(claimed.job, claimed.stopped.is_set) as adapters:
            if claimed.stop_reason is not None:
                return claimed.outcome(JobFinished(claimed.claim_key))
            self._engine.submit(claimed.engine_request(inputs, adapters, checkpoints))
            claimed.times.note_submitted()
            del inputs, checkpoints  # up to 80 MB of files and more, which the running job does not need
            finished = await claimed.engine_done
        self._checkpoints.note_result(claimed, finished)
        if finished.error is not None or claimed.stop_reason is not None:
            return claimed.outcome(finished)
        started = time.monotonic()
        # Uploads and previews end before the job is settled: a client that sees a terminal state finds every file.
        artifacts = await claimed.wait_for_artifacts()
        await claimed.wait_for_previews()
        return claimed.outcome(finished, artifacts, round(1000 * (time.monotonic() - started)))

    async def _fetch_inputs(self, claimed: ClaimedJob) -> InputFiles:
        """Read the job's input images; incomplete when the job is stopped first."""
        files: dict[str, bytes | None] = {}
        for name, ref in claimed.job.inputs.items():
            try:
                key, size = (ref.key, ref.bytes) if ref.source is None else await self._made(ref.source, name, claimed)
                read = partial(self._storage.read, key, 0, size)
                files[name] = await retry_while_unavailable(read, "input_read_failed", until=claimed.stopped.is_set)
            except NotFound:
                raise _InputMissing("the input image is no longer stored", param=name) from None
            except StorageRefused as error:
                raise _InputMissing(f"the input image cannot be read: {error.public}", param=name) from error
        return InputFiles(  # `Job.inputs` names several images `images.0`, `images.1`, ...
            images=tuple(data or b"" for name, data in files.items() if name.partition(".")[0] in ("image", "images")),
            mask=files.get("mask"),
            last_image=files.get("last_image"),
            controls=tuple(data or b"" for name, data in files.items() if name.startswith("controls.")),
            video=files.get("video"),
            face_video=files.get("face_video"),
            audio=files.get("audio"),
        )

    async def _made(self, source: ArtifactRef, param: str, claimed: ClaimedJob) -> tuple[str, int]:
        """Return the key and the size of an artifact that another job has made since this one was submitted."""
        read = partial(self._queue.jobs.get, source.job)
        record = await retry_while_unavailable(read, "source_read_failed", until=claimed.stopped.is_set)
        made = () if record is None or record.job.tenant != claimed.job.tenant else record.artifacts
        artifact = next((one for one in made if one.index == source.artifact), None)
        if artifact is None:
            message = f"artifact {source.artifact} of job {source.job}, from which it starts, is no longer stored"
            raise _InputMissing(message, param=param)
        return artifact.key, artifact.bytes

    async def _release(self, claimed: ClaimedJob) -> None:
        """Return a job to the queue, which another run can complete, after its checkpoint is stored."""
        await claimed.wait_for_checkpoint()
        release = partial(self._queue.claims.release, self._worker, {claimed.job.id: claimed.claim.epoch})
        await retry_while_unavailable(release, "release_failed", until=lambda: claimed.abandoned)
        claimed.stop(StopReason.RELEASED)

    async def _settle(self, claimed: ClaimedJob, outcome: Outcome) -> bool:
        """Write the outcome, log and count it; False when the claim is no longer current."""
        claimed.times.note_settling()
        job_id, epoch, token = claimed.job.id, claimed.claim.epoch, claimed.settle_token
        settled = await retry_while_unavailable(
            lambda: self._queue.claims.settle(self._worker, job_id, epoch, outcome, token=token, job=claimed.job),
            "settle_failed",
            until=lambda: claimed.abandoned,
        )
        if settled:
            collectors.settled(claimed.claim, outcome)
        else:
            metrics.claims_abandoned.labels(StopReason.LOST).inc()
        log.info(
            "job" if settled else "job_lost_before_settle",
            tenant=claimed.job.tenant,
            signature=claimed.claim.signature,
            state=outcome.state.value,
            jobs_fused=outcome.batching.max_jobs,
            mean_rows=outcome.batching.mean_rows,
            skipped_steps=outcome.batching.skipped_steps,
            solo_reason=outcome.batching.solo_reason,
            wait_ms=outcome.timings.queue_ms,
            inference_ms=outcome.timings.inference_ms,
            upload_ms=outcome.timings.upload_ms,
            device_seconds=outcome.device_seconds,
            resumed_steps=outcome.resumed_steps,
            error=outcome.error.code if outcome.error else None,
        )
        return bool(settled)

    async def _count_run(self, claimed: ClaimedJob, outcome: Outcome) -> None:
        """Count what a run has used that does not end its job."""
        if not outcome.device_seconds:
            return
        try:
            if await self._queue.claims.count_run(claimed.job, claimed.settle_token, outcome):
                collectors.used(claimed.job.model, outcome)
        except Unavailable as error:
            log.warning("run_not_counted", device_seconds=outcome.device_seconds, error=str(error))

    async def _remove_uploads(self, claimed: ClaimedJob) -> None:
        """Delete the uploads of a claim that another claim, or a deletion, has replaced.

        They stay until the job's retention ends when storage or Redis is unavailable.
        """
        claim = claimed.claim
        try:
            async with asyncio.timeout(CLEANUP_TIMEOUT_S):
                await claimed.wait_for_uploads()
                record = await self._queue.jobs.get(claim.job.id)
                # With the same epoch, the job was released, or settled after all: its artifacts can be in use.
                if record is None or record.epoch != claim.epoch:
                    await self._storage.delete_prefix(claim_prefix(claim.job, claim.epoch))
        except (Unavailable, TimeoutError) as error:
            log.warning("uploads_not_removed", error=str(error))


class _InputMissing(JobError, code="input_missing"): ...
