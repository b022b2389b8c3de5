"""Workers with an engine that runs no model: the test, or a timer, ends its jobs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from shared.config import models_file
from shared.config.catalog import Catalog
from shared.config.model_spec import ModelSpec
from shared.config.models_watch import ModelsWatch
from shared.config.request_limits import Defaults, Limits
from shared.config.settings import Settings
from shared.errors import JobError, LoadPostponed
from shared.job import Job
from shared.queue import Queue, Submission
from shared.signature import signature
from shared.storage import Storage, connect
from worker.engine.engine_status import Activity, EngineStatus, LoadFailure
from worker.engine.outputs import Output
from worker.engine.protocol import (
    CheckpointTaken,
    EngineEvents,
    EngineRequest,
    ForwardDone,
    ImageCheckpoint,
    JobFinished,
    JobProgress,
    MemoryOrders,
    OutputReady,
    PreviewReady,
)
from worker.worker import Worker


class StubEngine:
    """The worker's engine: finishes each job after `job_s`, or when the test calls `finish`; never if it hangs."""

    def __init__(self, events: EngineEvents, loaded: Sequence[str], job_s: float | None = None) -> None:
        self.events = events
        self.job_s = job_s
        self.requests: dict[str, EngineRequest] = {}  # unfinished, by claim key
        self.submitted: list[str] = []  # claim keys
        self.canceled: list[str] = []
        self.poison: set[str] = set()  # jobs that hang it
        self.states: dict[str, tuple[bytes | None, ...]] = {}  # what its checkpoints contain, by claim key
        self.hung = False  # ends its worker
        self.failure: str | None = None
        self.orders: list[MemoryOrders] = []
        self.replaced: list[frozenset[str]] = []  # the changed models of each change
        self.unloadable: dict[str, JobError] = {}  # by model; jobs end with these errors
        self._status = EngineStatus(device="cpu", loaded_models=tuple(loaded))

    def start(self) -> None: ...

    def warm_up(self) -> None: ...

    def stop(self, timeout_s: float) -> None: ...

    def submit(self, *requests: EngineRequest) -> None:
        for request in requests:
            self.requests[request.claim_key] = request
            self.submitted.append(request.claim_key)
            if request.job.id in self.poison:
                self.hung = True
            if error := self.unloadable.get(request.job.model):
                self.finish(request.claim_key, error)
            elif self.job_s is not None:
                asyncio.get_running_loop().call_later(self.job_s, self.finish, request.claim_key)

    def cancel(self, claim_key: str) -> None:
        self.canceled.append(claim_key)
        if self.requests.pop(claim_key, None) is not None:
            self.events.on_event(JobFinished(claim_key, canceled=True))

    def release_all(self) -> None:
        for claim_key in tuple(self.requests):
            self.cancel(claim_key)

    def take_checkpoints(self, *claim_keys: str) -> None:
        for claim_key in claim_keys:
            if claim_key in self.requests:
                self.checkpoint(claim_key, *self.states.get(claim_key, ()))

    def checkpoint(self, claim_key: str, *files: bytes | None) -> None:
        """Report a checkpoint; the length of a file is its step."""
        images = tuple(None if file is None else ImageCheckpoint(file, len(file), 2 * len(file)) for file in files)
        self.events.on_event(CheckpointTaken(claim_key, images))

    def hand_over(self, *claim_keys: str) -> None:
        self.take_checkpoints(*claim_keys)
        for claim_key in claim_keys:
            self.cancel(claim_key)

    def order_models(self, orders: MemoryOrders) -> None:
        self.orders.append(orders)

    def replace_models(self, catalog: Catalog, changed: Collection[str]) -> None:
        self.replaced.append(frozenset(changed))

    def status(self) -> EngineStatus:
        if not self.hung:
            failures = {
                model: LoadFailure(error.message, not isinstance(error, LoadPostponed), time.monotonic() + 60)
                for model, error in self.unloadable.items()
            }
            loaded = tuple(model for model in self._status.loaded_models if model not in failures)
            return replace(self._status, loaded_models=loaded, unavailable_models=failures)
        return EngineStatus(device="cpu", activity=Activity(busy=True, since_s=float("-inf")), failure=self.failure)

    def finish(self, claim_key: str, error: JobError | None = None) -> None:
        """End a job with one black image, or with an error; canceled ones have ended already."""
        if self.hung or (request := self.requests.pop(claim_key, None)) is None:
            return
        if error is None:
            self.events.on_event(OutputReady(claim_key, 0, Output(np.zeros((8, 8, 3), np.uint8))))
        resumed = sum(len(file) for file in request.checkpoints if file is not None)
        self.events.on_event(JobFinished(claim_key, error, resumed_steps=resumed))

    def step(self, claim_key: str, step: int, total: int) -> None:
        self.events.on_event(JobProgress(claim_key, step, total))

    def preview(self, claim_key: str) -> None:
        self.events.on_event(PreviewReady(claim_key, 0, np.zeros((8, 8, 3), np.uint8)))

    def forward(self, claim_key: str, rows: int, seconds: float) -> None:
        """Report a forward of the job's size."""
        job = self.requests[claim_key].job
        shape = f"{job.width}x{job.height}"
        self.events.on_event(ForwardDone(job.model, rows, rows, seconds, "cpu", shape, claim_key))


class StubFleet:
    """Workers on one queue, each with a `StubEngine`; every worker loads the models named for it."""

    def __init__(self, queue: Queue, folder: Path, **settings: Any) -> None:
        self.queue = queue
        changes = {"storage_dir": folder / "storage", "device": "cpu", "drain_timeout_s": 3.0, **settings}
        self.settings: Settings = queue.client.settings.model_copy(update=changes)
        self.storage: Storage = connect(self.settings)
        self.workers: list[Worker] = []
        self.engines: list[StubEngine] = []
        self.max_batch = 8
        self.slice_s: dict[str, float] = {}  # by model

    async def submit(self, *jobs: Job, window_ms: int = 0) -> None:
        outcomes = await self.queue.jobs.submit([Submission(j, signature(j), window_ms, self.max_batch) for j in jobs])
        assert all(hasattr(outcome, "job_id") for outcome in outcomes), outcomes

    @asynccontextmanager
    async def worker(
        self, *models: str, job_s: float | None = None, queue: Queue | None = None, loaded: Sequence[str] | None = None
    ) -> AsyncIterator[tuple[Worker, StubEngine]]:
        """Run a worker until the end of the block, which drains it."""
        worker, engine, running = self.start(*models, job_s=job_s, queue=queue, loaded=loaded)
        try:
            yield worker, engine
        finally:
            worker.drain()
            await running

    def start(
        self,
        *models: str,
        job_s: float | None = None,
        queue: Queue | None = None,
        loaded: Sequence[str] | None = None,
        file: Path | None = None,
    ) -> tuple[Worker, StubEngine, asyncio.Task[int]]:
        """Start a worker; with a models `file`, one that follows its changes."""

        def engine(_catalog: Catalog, events: EngineEvents, _settings: Settings) -> Any:
            self.engines.append(StubEngine(events, models if loaded is None else loaded, job_s))
            return self.engines[-1]

        specs = [_spec(model, self.max_batch, self.slice_s.get(model, 0.0)) for model in models]
        catalog, watch = Catalog(tuple(specs)), None
        if file is not None:
            catalog, watch = models_file.load(file), ModelsWatch(file, None)
        worker = Worker(catalog, queue or self.queue, self.storage, self.settings, engine, watch)
        self.workers.append(worker)
        return worker, self.engines[-1], asyncio.create_task(worker.run())

    async def close(self) -> None:
        await self.storage.close()


def _spec(model: str, max_batch: int, slice_s: float) -> ModelSpec:
    limits, defaults = Limits(multiple_of=8, max_images=max_batch), Defaults(width=64, height=64, steps=4)
    return ModelSpec(id=model, source="none", max_batch=max_batch, slice_s=slice_s, limits=limits, defaults=defaults)
