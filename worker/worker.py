"""The worker's lifecycle: start, claim and run jobs, drain, stop."""

import asyncio
import os
import socket
import time
from collections.abc import Sequence, Set
from functools import partial
from typing import Any

import structlog

from shared.config.catalog import Catalog
from shared.config.models_watch import ModelsWatch
from shared.config.settings import Settings
from shared.errors import RedisUnavailable
from shared.job import Job
from shared.queue import Claim, Queue
from shared.runtime import metrics
from shared.runtime.asyncio_tools import cancel_and_wait, retry_while_unavailable
from shared.runtime.clock import new_id
from shared.runtime.log import announce
from shared.storage import Storage
from worker.adapter_folder import AdapterFolder
from worker.claims.checkpoint_store import CheckpointStore
from worker.claims.claimed_job import ClaimedJob, StopReason
from worker.claims.claiming import ClaimLoop
from worker.claims.leases import Leases
from worker.claims.time_slices import TimeSlices
from worker.cost_curves import CostCurves
from worker.engine.protocol import EngineFactory, ForwardDone, ModelLoaded
from worker.engine.remote import RemoteEngine
from worker.engine_events import EngineEventHandler
from worker.handing_over import HandingOver
from worker.job_runner import JobRunner
from worker.metrics import collectors
from worker.metrics.batch_log import BatchLog
from worker.model_availability import ModelAvailability, ModelOrderReader
from worker.models_reload import ModelsReload
from worker.output.image_encoding import PreviewPublisher
from worker.output.sending import OutputSender
from worker.output.upload import Uploader
from worker.progress import ProgressReporter

log = structlog.get_logger()

EXIT_HUNG = 70
LOSE_S = 3.0
COUNT_S = 5.0
RELEASE_S = 10.0  # how long a drain retries the release of its jobs during an outage of Redis


class Worker:
    """Serves the catalog's models until `drain` is called.

    `ClaimLoop` claims jobs, `JobRunner` runs each in a task. The engine computes in another process (or in whatever
    `engine` returns), so that leases are renewed and outputs uploaded on this event loop during a forward.
    """

    def __init__(
        self,
        catalog: Catalog,
        queue: Queue,
        storage: Storage,
        settings: Settings,
        engine: EngineFactory = RemoteEngine,
        watch: ModelsWatch | None = None,
    ) -> None:
        self.name = f"{socket.gethostname()[:40]}-{os.getpid()}-{new_id('w')[-6:]}"  # unique to this start
        self._catalog = catalog
        self._queue = queue
        self._drain_timeout_s = settings.drain_timeout_s
        self._device = settings.device
        self._watch = watch
        self._models = [spec.id for spec in catalog]
        self._claimed_jobs: dict[str, ClaimedJob] = {}  # by claim key
        self._tasks: set[asyncio.Task[None]] = set()
        self._publishing: set[asyncio.Task[None]] = set()
        self._draining = asyncio.Event()
        self._sender = OutputSender(queue, settings)
        self._uploader = Uploader(storage, settings.spool_bytes, self._sender)
        self._cost_curves = CostCurves()
        self._batch_log = BatchLog(catalog)
        self._scrape_metrics = collectors.ScrapeMetrics()
        self._progress = ProgressReporter(
            queue, self._claimed_jobs, self._cost_curves, self.name, catalog, self._models_fault
        )
        previews = PreviewPublisher(queue)
        checkpoints = CheckpointStore(queue, storage, self.name)
        events = EngineEventHandler(
            self._claimed_jobs,
            self._uploader,
            previews,
            on_change=self._job_changed,
            on_forward=self._forward_done,
            on_model_loaded=self._model_loaded,
            on_checkpoint=checkpoints.take,
        )
        self._engine = engine(catalog, events, settings)
        self._handing_over = HandingOver(self._engine, self._claimed_jobs, self._tasks)
        self._availability = ModelAvailability(queue, self._engine, self.name, self._models)
        self._adapters = AdapterFolder(queue, storage, settings.adapter_folder_bytes)
        self._progress.set_worker_pool(settings.worker_pool)
        self._model_orders = ModelOrderReader(queue, self._engine, lambda: self._progress.info)
        self._runner = JobRunner(queue, storage, self._adapters, self._engine, self._availability, checkpoints)
        self._leases = Leases(queue, self._engine, self._claimed_jobs, self.name, settings)
        self._claim_loop = ClaimLoop(
            self.name,
            queue,
            self._engine,
            self._availability,
            catalog,
            settings,
            self._claimed_jobs,
            self._uploader,
            self._batch_log,
            self._cost_curves,
            self._start_job,
        )
        self._models_reload = ModelsReload(
            catalog,
            self._engine,
            self._availability,
            self._claim_loop,
            self._claimed_jobs,
            self._models_changed,
            self._restart,
        )
        self._slices = TimeSlices(self._claim_loop, self._engine, checkpoints, self._claimed_jobs)

    async def run(self) -> int:
        """Work until drained; return the exit status of the process."""
        # Redis can start after its workers.
        await retry_while_unavailable(self._queue.check, "redis_unavailable", until=self._draining.is_set, max_s=1.0)
        if self._draining.is_set():
            return 0
        await asyncio.to_thread(self._adapters.remove_leftovers)
        self._engine.start()
        progress = self._progress.report_progress(), self._progress.send_heartbeats(self._engine)
        models = self._availability.watch(), self._model_orders.watch()
        policies = self._queue.policies.keep_announced("worker")
        loops = (*self._leases.loops(), *progress, *models, policies, self._claim_loop.listen(), self._slices.watch())
        background = [asyncio.create_task(loop) for loop in loops]
        if self._watch is not None:
            background.append(asyncio.create_task(self._watch.follow(self._models_reload.apply)))
        try:
            return await self._work_until_drained(background)
        finally:
            await cancel_and_wait((*background, *self._publishing))
            self._uploader.close()
            await self._sender.close()
            await asyncio.to_thread(self._adapters.close)

    def drain(self) -> None:
        """Stop claiming, finish running jobs, hand over those that exceed the drain timeout, and exit."""
        log.info("drain_started", running=len(self._claimed_jobs))
        self._progress.set_state("draining")
        self._draining.set()
        self._claim_loop.stop()

    def _restart(self, reason: str) -> None:
        """Drain, so that a process with the changed models file takes the place of this one."""
        log.warning("worker_restarts", reason=reason)
        self.drain()

    def _models_fault(self) -> str | None:
        return None if self._watch is None else self._watch.fault

    def _models_changed(self) -> None:
        self._models[:] = [spec.id for spec in self._catalog]
        self._progress.set_models(self._catalog)

    def unready(self) -> str | None:
        """Return why this worker claims no jobs now; None when it does."""
        return self._progress.unready() or self._no_usable_model()

    async def refresh_metrics(self) -> None:
        """Bring the metrics of this process up to date."""
        metrics.spool_bytes.set(self._uploader.held_bytes)
        metrics.spool_limit_bytes.set(self._uploader.spool_bytes)
        metrics.running_slots.set(self._batch_log.running_slots)
        metrics.worker_ready.set(self.unready() is None)
        status = self._engine.status()
        metrics.worker_without_gpu.set(self._device is None and status.device == "cpu")
        await self._scrape_metrics.refresh(status)

    @property
    def slots_in_use(self) -> int:
        """Images of all claimed jobs, those being uploaded included."""
        return sum(job.slots for job in self.jobs)

    @property
    def jobs(self) -> list[Job]:
        """The claimed jobs."""
        return [claimed.job for claimed in self._claimed_jobs.values()]

    def _no_usable_model(self) -> str | None:
        """Return why no model can be loaded; None while one may be."""
        status = self._engine.status()
        if status.usable(self._models):
            return None
        return f"no model can be loaded: {'; '.join(one.reason for one in status.unavailable_models.values())}"

    async def _warm_up(self) -> None:
        await self._model_orders.read()  # they decide what is loaded
        await asyncio.to_thread(self._engine.warm_up)
        if not self._draining.is_set():
            self._progress.set_state("ready")
            if reason := self._no_usable_model():
                log.error("models_unavailable", reason=reason, remedy="correct what it names: loads are repeated")
            announce("worker_ready", worker=self.name, models=self._models)

    async def _work_until_drained(self, background: Sequence[asyncio.Task[None]]) -> int:
        warming, hung = asyncio.create_task(self._warm_up()), asyncio.create_task(self._leases.hung.wait())
        work, watched = [warming], {hung, *background}
        try:
            if await self._first(warming, watched):
                warming.result()
                work.append(asyncio.create_task(self._claim_loop.run()))
                if await self._first(work[-1], watched):
                    if not self._draining.is_set():  # the queue has jobs of a newer version
                        self.drain()
                    finishing = self._handing_over.finish_jobs(self._drain_timeout_s)
                    await self._first(asyncio.create_task(finishing), watched)
            await self._release_jobs()
        finally:
            await cancel_and_wait((hung, *work))
        for task in (*work, *background):  # those of `background` end with an error only
            if task.done() and not task.cancelled():
                task.result()
        await asyncio.to_thread(self._engine.stop, self._drain_timeout_s)
        return 0

    async def _first(self, work: asyncio.Task[None], watched: Set[asyncio.Task[Any]]) -> bool:
        """Wait for `work`; False if a background loop ends first. Ends the process if the GPU thread hangs."""
        await asyncio.wait({work, *watched}, return_when=asyncio.FIRST_COMPLETED)
        if self._leases.hung.is_set():
            self._claim_loop.stop()
            await self._lose_jobs(self._leases.hung_cause)
            os._exit(EXIT_HUNG)  # a hung thread cannot be stopped
        if not work.done():
            await cancel_and_wait((work,))
        return not work.cancelled()

    async def _lose_jobs(self, cause: str) -> None:
        """Give up the engine's jobs with the cause of its end, and release those that have left it."""
        lost = {one.job.id: one.claim.epoch for one in self._claimed_jobs.values() if not one.engine_done.done()}
        left = {one.job.id: one.claim.epoch for one in self._claimed_jobs.values() if one.engine_done.done()}
        try:
            async with asyncio.timeout(LOSE_S):
                await self._queue.claims.release(self.name, left)
                await self._queue.claims.lose(self.name, lost, cause)
        except (RedisUnavailable, TimeoutError) as error:
            log.warning("claims_not_given_up", error=str(error), remedy="none: their leases expire")

    def _start_job(self, claim: Claim) -> None:
        job, earlier = claim.job, self._claimed_jobs.get(claim.key)
        if earlier is not None:
            run = self._claimed_again(earlier)
        else:
            try:
                claimed = ClaimedJob(claim, self._catalog.for_size(job.model, job.width, job.height))
                collectors.claimed(claim)
                self._batch_log.admit(claimed)
            except Exception as error:
                run = self._runner.fail(claim, error)
            else:
                self._claimed_jobs[claimed.claim_key] = claimed
                run = self._run_job(claimed)
        task = asyncio.create_task(run, name=claim.key)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _claimed_again(self, earlier: ClaimedJob) -> None:
        """Let the earlier run of a claim go on, or end it here: a failover of Redis has given out its epoch again."""
        log.info("job_claimed_again", job_id=earlier.job.id, ended=earlier.abandoned)
        if earlier.abandoned:
            epochs = {earlier.job.id: earlier.claim.epoch}
            release = partial(self._queue.claims.release, self.name, epochs)
            await retry_while_unavailable(release, "release_failed", until=self._draining.is_set)

    async def _run_job(self, claimed: ClaimedJob) -> None:
        try:
            if claimed.claim.must_run_solo:
                await self._wait_for_other_jobs(claimed)
            await self._runner.run(claimed)
        except Exception:
            # The job stays unsettled: its lease expires, and it is retried solo.
            log.exception("job_runner_failed", job_id=claimed.job.id)
        finally:
            self._claimed_jobs.pop(claimed.claim_key, None)
            self._batch_log.remove(claimed)
            self._claim_loop.end_pause()

    async def _wait_for_other_jobs(self, claimed: ClaimedJob) -> None:
        """Wait until this worker holds no other job, or `claimed` is stopped: a lost job can end the process again."""
        stopped = asyncio.create_task(claimed.stopped.wait())
        try:
            while not stopped.done() and (others := self._tasks - {asyncio.current_task()}):
                await asyncio.wait({stopped, *others}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_and_wait((stopped,))

    def _job_changed(self, claimed: ClaimedJob) -> None:
        self._progress.mark_changed(claimed)
        if claimed.engine_done.done():
            self._batch_log.remove(claimed)
        occupied, claimed.occupied_slots = claimed.occupied_slots, claimed.slots if claimed.occupies_slots else 0
        if claimed.occupied_slots < occupied:
            self._claim_loop.end_pause()

    def _forward_done(self, forward: ForwardDone) -> None:
        self._progress.count_forward(forward)
        self._batch_log.count_forward(forward)
        if claimed := self._claimed_jobs.get(forward.claim_key):
            self._cost_curves.add(claimed.claim.signature, forward)

    def _model_loaded(self, event: ModelLoaded) -> None:
        """Publish the layers of a model, which uploaded adapters are checked against, its inputs, and other facts."""
        spec = self._catalog.find(event.model)
        if spec is None:  # it has just been removed from the models file
            return

        async def publish() -> None:
            await self._queue.adapters.publish_layers(spec, event.layers)
            await self._queue.model_inputs.publish(spec, event.inputs)
            await self._queue.model_facts.publish(spec, event.facts)

        task = asyncio.create_task(retry_while_unavailable(publish, "model_unpublished", until=self._draining.is_set))
        self._publishing.add(task)
        task.add_done_callback(self._publishing.discard)

    async def _release_jobs(self) -> None:
        """Release the jobs that are still running, to be claimed elsewhere at once."""
        if not (unfinished := list(self._claimed_jobs.values())):
            return
        for claimed in unfinished:
            claimed.stop(StopReason.RELEASED)
        self._engine.release_all()
        epochs = {claimed.job.id: claimed.claim.epoch for claimed in unfinished}
        release, give_up_s = partial(self._queue.claims.release, self.name, epochs), time.monotonic() + RELEASE_S
        released = await retry_while_unavailable(
            release, "release_failed", until=lambda: time.monotonic() > give_up_s, max_s=1.0
        )
        log.info("jobs_released", jobs=released)  # None: their leases expire
        if self._tasks:  # each counts what it has used, when the engine has ended its present forward
            await asyncio.wait(set(self._tasks), timeout=COUNT_S)
        await cancel_and_wait(self._tasks)
