"""The worker's event loop: it claims jobs for free seats, sees each through, and drains when told to."""

from __future__ import annotations

import asyncio
import os
import random
import socket
from collections.abc import Awaitable, Callable, Sequence

import structlog

from shared.config.models_file import Catalog
from shared.config.settings import Settings
from shared.errors import RedisUnavailable
from shared.job import Priority
from shared.queue import Claim, Queue
from shared.runtime.cancellation import canceled
from shared.runtime.clock import new_id
from shared.runtime.log import announce
from shared.storage import Storage
from worker.batch_log import BatchLog
from worker.claiming import ClaimRequest, InteractiveHint, RunningJob, asks, leading, loads_ms
from worker.cost_curves import CostCurves
from worker.engine import EngineFactory, ForwardDone, allowed_rows
from worker.engine.remote import RemoteEngine
from worker.engine_events import EngineEventHandler
from worker.job_runner import ClaimedJob, JobRunner, StopReason
from worker.leases import Leases
from worker.metrics import collectors
from worker.metrics.collectors import Gauges
from worker.output.images import PreviewPublisher
from worker.output.upload import Uploader
from worker.progress import ProgressReporter

log = structlog.get_logger()

LONGEST_PAUSE_S = 2.0
SHORTEST_PAUSE_S = 0.05
LONGEST_RETRY_S = 5.0
EXIT_HUNG = 70


def worker_name() -> str:
    """Return a name that tells host and process, and is new at every start."""
    return f"{socket.gethostname()[:40]}-{os.getpid()}-{new_id('w')[-6:]}"


class Worker:
    """Serves the catalog's models until `drain` is called.

    A job's walk: `_claim` here, then `Service.serve` (input, seat, pictures, settle). The engine computes in a
    process of its own, unless `engine` makes another; this loop does everything else, so leases are renewed and
    pictures uploaded while a forward runs.
    """

    def __init__(
        self,
        catalog: Catalog,
        queue: Queue,
        storage: Storage,
        settings: Settings,
        engine: EngineFactory = RemoteEngine,
    ) -> None:
        self.name = worker_name()
        self._catalog = catalog
        self._queue = queue
        self._storage = storage
        self._settings = settings
        self._models = [spec.id for spec in catalog]
        self._largest_batch = max(spec.max_batch for spec in catalog)
        self._runs: dict[str, ClaimedJob] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stirred = asyncio.Event()
        self._urgent = InteractiveHint()
        self._draining = asyncio.Event()
        self._delivery = Uploader(storage, settings.spool_bytes)
        self._curves = CostCurves()
        self._batches = BatchLog(catalog)
        self._gauges = Gauges()
        self._reporter = ProgressReporter(queue, self._runs, self._curves, self.name, catalog)
        previews = PreviewPublisher(queue)
        bridge = EngineEventHandler(
            self._runs, self._delivery, previews, on_change=self._changed, on_forward=self._measured
        )
        self._engine = engine(catalog, bridge, settings)
        self._service = JobRunner(queue, storage, self._engine, self.name)
        self._keeper = Leases(queue, self._engine, self._runs, self.name, settings)

    def drain(self) -> None:
        """Claim nothing more, finish what runs, give back what does not finish in time, and leave."""
        log.info("draining", running=len(self._runs))
        self._reporter.become("draining")
        self._draining.set()
        self._stirred.set()

    def unready(self) -> str | None:
        """Return why this worker takes no jobs now; None: it does."""
        return self._reporter.unready() or self._useless()

    def _useless(self) -> str | None:
        """Return why none of the models can be served; None: one can, for all that is known."""
        engine = self._engine.status()
        unavailable = engine.unavailable_models
        if engine.loaded_models or unavailable.keys() != set(self._models):
            return None
        return f"no model can be loaded: {'; '.join(unavailable.values())}"

    async def refresh_metrics(self) -> None:
        """Bring the gauges of this process up to date."""
        await self._gauges.refresh(
            self._engine.status(),
            spool_bytes=self._delivery.held_bytes,
            spool_limit_bytes=self._delivery.spool_bytes,
            running_slots=self._batches.seats,
            ready=self.unready() is None,
        )

    @property
    def seats_in_use(self) -> int:
        """Pictures that this worker has in its hands."""
        return sum(run.claim.job.slots for run in self._runs.values())

    async def run(self) -> int:
        """Work until drained; returns the process's exit status, not 0 when the GPU thread hung."""
        if not await self._until_redis(self._queue.check):
            return 0
        self._engine.start()
        upkeep = [
            asyncio.create_task(duty)
            for duty in (
                self._keeper.renew_leases(),
                self._keeper.reclaim_losses(),
                self._keeper.watch_deadlines(),
                self._reporter.report_progress(),
                self._reporter.beat(self._engine),
                self._listen(),
            )
        ]
        try:
            await asyncio.to_thread(self._engine.warm_up)
            if not self._draining.is_set():
                self._reporter.become("ready")
                if reason := self._useless():
                    log.error(
                        "nothing_to_serve", reason=reason, remedy="its jobs fail; mend the models file or the files"
                    )
                announce("worker_ready", worker=self.name, models=self._models)
            return await self._until_drained_or_hung(upkeep)
        finally:
            await canceled(upkeep)
            self._delivery.close()

    async def _until_drained_or_hung(self, upkeep: list[asyncio.Task[None]]) -> int:
        claiming = asyncio.create_task(self._claim_until_drained())
        hung = asyncio.create_task(self._keeper.hung.wait())
        done, _ = await asyncio.wait({claiming, hung, *upkeep}, return_when=asyncio.FIRST_COMPLETED)
        if hung in done:
            # The thread cannot be stopped; its jobs are reclaimed when their leases run out.
            os._exit(EXIT_HUNG)
        hung.cancel()
        for task in done - {claiming}:
            task.result()
        await claiming
        await self._finish_runs()
        await asyncio.to_thread(self._engine.stop, self._settings.drain_timeout_s)
        return 0

    async def _claim_until_drained(self) -> None:
        retry_s = 0.1
        while not self._draining.is_set():
            self._stirred.clear()
            try:
                asked = self._asks()
                claims = await self._claim(asked)
                pause_s = 0.0 if claims else await self._idle_s(asked)
                retry_s = 0.1
            except RedisUnavailable as error:
                log.warning("claiming_waits_for_redis", error=error.message)
                await asyncio.sleep(random.uniform(retry_s / 2, retry_s))
                retry_s = min(2 * retry_s, LONGEST_RETRY_S)
                continue
            for claim in claims:
                self._start(claim)
            if self._queue.claims.outdated:
                self.drain()  # else it would claim the same job over and over
            if pause_s:
                await self._stir(pause_s)

    async def _claim(self, asked: Sequence[ClaimRequest]) -> list[Claim]:
        """Claim for the free seats, and interactive jobs that may set others aside."""
        for ask in asked:
            if claims := await self._put(ask):
                return claims
        return []

    def _asks(self) -> list[ClaimRequest]:
        """Return what to ask the queue for; a full worker does not ask while no interactive job can wait."""
        wanted = self._wanted()
        return wanted if self._urgent.likely else [ask for ask in wanted if ask.lowest is not Priority.INTERACTIVE]

    def _wanted(self) -> list[ClaimRequest]:
        if self._delivery.full:
            return []
        runs = [run for run in self._runs.values() if run.occupies_seats]
        seated = [_seated(run) for run in runs]
        rows = self._largest_batch
        if seated:
            first = runs[[one.signature for one in seated].index(leading(seated))]
            most = allowed_rows(self._engine.status(), first.claim.job, first.spec.max_batch)
            rows = self._curves.rows(first.claim.signature, most)
            self._batches.bound(first.claim.signature, most, rows)
        aside = rows if self._settings.max_preempted_rows is None else self._settings.max_preempted_rows
        return asks(seated, rows, self._largest_batch, aside)

    async def _put(self, ask: ClaimRequest) -> list[Claim]:
        if ask.signature is not None:
            held_back = self._batches.hold_back
            return await self._queue.claims.join(
                self.name, ask.signature, ask.seats, models=self._loads(), lowest=ask.lowest, held_back=held_back
            )
        if ask.lowest is Priority.BULK:
            return await self._queue.claims.claim(self.name, self._loads(), ask.seats)
        # Of models in memory only: a load would find no room beside one whose jobs are parked.
        return await self._queue.claims.claim(
            self.name, self._engine.status().loaded_models, ask.seats, lowest=ask.lowest, accompanied=True
        )

    def _loads(self) -> dict[str, int]:
        engine = self._engine.status()
        return loads_ms(self._models, engine.loaded_models, engine.load_seconds, engine.unavailable_models)

    async def _idle_s(self, asked: Sequence[ClaimRequest]) -> float:
        """Return how long to wait for a wake-up before looking again, `asked` having given nothing."""
        ripens_in_ms = None
        if not any(run.occupies_seats for run in self._runs.values()):
            ripens_in_ms = await self._queue.claims.next_ready_ms(self._loads(), worker=self.name)
        elif any(ask.lowest is Priority.INTERACTIVE for ask in asked):
            hints = self._urgent.hints
            loaded = self._engine.status().loaded_models
            waits_ms = await self._queue.claims.next_ready_ms(loaded, lowest=Priority.INTERACTIVE)
            if waits_ms is None:
                self._urgent.none_waits(hints)
            if any(ask.signature is None for ask in asked):
                ripens_in_ms = waits_ms
        if ripens_in_ms is None:
            return LONGEST_PAUSE_S
        # What is ripe by now could not be had: somebody else was faster, or it needs more seats than are free.
        return SHORTEST_PAUSE_S if ripens_in_ms <= 0 else min(ripens_in_ms / 1000, LONGEST_PAUSE_S)

    async def _stir(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._stirred.wait()
        except TimeoutError:
            pass

    async def _listen(self) -> None:
        """Turn wake-ups in Redis into a stir of this loop."""
        while True:
            try:
                came = await self._queue.claims.wait_wakeup(LONGEST_PAUSE_S)
                if came in (None, Priority.INTERACTIVE):
                    self._urgent.hint()
                self._stirred.set()
            except RedisUnavailable:
                await asyncio.sleep(random.uniform(0.5, 1.0))

    def _measured(self, facts: ForwardDone) -> None:
        self._reporter.count_forward(facts)
        self._batches.forward(facts)
        # Not one that is only being uploaded: it may be of another signature than the batch that runs by now.
        running = next(
            (run for run in self._runs.values() if run.spec.id == facts.model and not run.engine_done.done()), None
        )
        if running is not None:
            self._curves.measure(running.claim.signature, facts)

    def _changed(self, run: ClaimedJob) -> None:
        self._reporter.note(run)
        if run.engine_done.done():
            self._batches.leave(run)
        if not run.occupies_seats:
            self._stirred.set()

    def _start(self, claim: Claim) -> None:
        job = claim.job
        run = ClaimedJob(claim, self._catalog.for_size(job.model, job.width, job.height))
        self._runs[run.key] = run
        collectors.claimed(claim)
        self._batches.admit(run)
        task = asyncio.create_task(self._see_through(run), name=run.key)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _see_through(self, run: ClaimedJob) -> None:
        try:
            await self._service.serve(run)
        except Exception:
            # The lease runs out and the job is tried again, alone: better than an answer nobody planned.
            log.exception("run_failed", job_id=run.claim.job.id)
        finally:
            self._runs.pop(run.key, None)
            self._batches.leave(run)
            self._stirred.set()

    async def _finish_runs(self) -> None:
        """Let what runs end within the drain's time; give the rest back, to be claimed elsewhere at once."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=self._settings.drain_timeout_s)
        left = list(self._runs.values())
        if not left:
            return
        for run in left:
            run.stop(StopReason.RELEASED)
        self._engine.release_all()
        try:
            released = await self._queue.claims.release(self.name, {run.claim.job.id: run.claim.epoch for run in left})
            log.info("released", jobs=released)
        except RedisUnavailable as error:
            log.warning("release_failed", jobs=len(left), error=error.message, remedy="their leases will run out")
        await canceled(self._tasks)

    async def _until_redis(self, action: Callable[[], Awaitable[None]]) -> bool:
        """Run `action` until Redis answers: a worker may be up before its Redis is. False: it was told to leave."""
        while not self._draining.is_set():
            try:
                await action()
                return True
            except RedisUnavailable as error:
                log.warning("waiting_for_redis", error=error.message)
                await self._stir(random.uniform(0.5, 1.5))
        return False


def _seated(run: ClaimedJob) -> RunningJob:
    job = run.claim.job
    return RunningJob(run.claim.signature, job.slots, job.priority is Priority.INTERACTIVE, run.claim.solo)
