"""A worker on a real Redis: preemption, and jobs that end early in a running batch."""

from __future__ import annotations

import asyncio
import contextlib
import io
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.engine import EngineHarness, a_job, a_spec
from harness.queue import put
from PIL import Image

from shared.config.catalog import Catalog
from shared.job import Job, State
from shared.job_fields import Priority
from shared.job_record import JobRecord
from shared.queue import Queue, Submission
from shared.signature import signature
from shared.storage import connect
from worker.engine.engine import Engine
from worker.engine.fusion import fused_call
from worker.engine.fusion.module_proxy import ParkedCall
from worker.worker import Worker

pytestmark = pytest.mark.usefixtures("quick_loads")

Eventually = Callable[..., Awaitable[None]]
LONG = 30  # steps: the batch takes many times as long as an interactive job
EARLY, LATE = 3, 20  # forwards of the batch, between which the interactive job runs


class WorkerHarness:
    """A running worker, its queue and its storage."""

    def __init__(self, queue: Queue, folder: Path, tmp_path: Path, eventually: Eventually) -> None:
        changes = {"storage_dir": tmp_path / "storage", "device": "cpu", "torch_threads": 1, "drain_timeout_s": 30.0}
        settings = queue.client.settings.model_copy(update=changes)
        self.queue = queue
        self.storage = connect(settings)
        self.spec = a_spec(folder, max_batch=2)
        self.worker = Worker(Catalog((self.spec,)), queue, self.storage, settings, Engine)
        self._eventually = eventually

    async def submit(self, *jobs: Job) -> None:
        await put(self.queue, *(Submission(job, signature(job), 0, self.spec.max_batch) for job in jobs))

    async def record(self, name: str) -> JobRecord:
        record = await self.queue.jobs.get(name)
        assert record is not None
        return record

    async def running(self, *names: str) -> None:
        """Wait until the jobs report their first steps."""

        async def all_running() -> bool:
            records = [await self.record(name) for name in names]
            return all(record.state is State.RUNNING and record.progress.step > 0 for record in records)

        await self._eventually(all_running, f"{names} are running", 60)

    async def ended(self, *names: str) -> list[JobRecord]:
        async def all_ended() -> bool:
            return all([(await self.record(name)).state.terminal for name in names])

        await self._eventually(all_ended, f"{names} have ended", 60)
        return [await self.record(name) for name in names]

    async def pixels(self, record: JobRecord) -> np.ndarray:
        data = await self.storage.read(record.artifacts[0].key)
        return np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)


@pytest.fixture
def start_worker(queue: Queue, tiny_models: Path, tmp_path: Path, eventually: Eventually) -> Callable[[], Any]:
    @asynccontextmanager
    async def start() -> AsyncIterator[WorkerHarness]:
        harness = WorkerHarness(queue, tiny_models / "sd", tmp_path, eventually)
        running = asyncio.create_task(harness.worker.run())
        try:
            yield harness
        finally:
            harness.worker.drain()
            assert await running == 0
            await harness.storage.close()

    return start


class ForwardGate:
    """Blocks the engine thread at two forwards until `open`: the engine can run ahead of the event loop."""

    def __init__(self, first: int, second: int) -> None:
        self._forward = fused_call.run_fused
        self._opened = {first: threading.Event(), second: threading.Event()}
        self._forwards = 0
        self.harness: WorkerHarness | None = None

    def forward(self, calls: Sequence[ParkedCall], *more: Any) -> list[Any]:
        if calls[0].shared_method.component == "unet" and self.harness and self.harness.worker.slots_in_use:
            self._forwards += 1
            if self._forwards in self._opened:
                self._opened[self._forwards].wait(60)
        return self._forward(calls, *more)

    def open(self, at: int | None = None) -> None:
        """Continue at one of the two forwards, or at both when None."""
        for number, opened in self._opened.items():
            if at in (None, number):
                opened.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[ForwardGate]:
    gate = ForwardGate(EARLY, LATE)
    monkeypatch.setattr(fused_call, "run_fused", gate.forward)
    yield gate
    gate.open()


@pytest.mark.parametrize("width", [64, 96])
async def test_interactive_job_preempts_a_full_bulk_batch(
    width: int, start_worker: Callable[[], Any], tiny_models: Path, gate: ForwardGate, eventually: Eventually
) -> None:
    """Of the batch's signature or another one: it ends first, and all images equal those of solo runs."""
    batch = [a_job(f"bulk{number}", steps=LONG, priority=Priority.BULK) for number in range(2)]
    interactive = a_job("interactive", steps=3, width=width, priority=Priority.INTERACTIVE)
    async with start_worker() as harness, contextlib.AsyncExitStack() as stack:
        stack.callback(gate.open)
        gate.harness = harness
        await harness.submit(*batch, a_job("queued", steps=2, priority=Priority.BULK))
        await harness.running("bulk0", "bulk1")
        await harness.submit(interactive)
        await eventually(lambda: harness.worker.slots_in_use == 3, "the interactive job is claimed", 60)
        gate.open(EARLY)
        (first,) = await harness.ended("interactive")
        assert [(await harness.record(job.id)).state for job in batch] == [State.RUNNING] * 2
        assert (await harness.record("queued")).state is State.QUEUED, "bulk jobs are not claimed beyond the slots"
        gate.open(LATE)
        records = [first, *await harness.ended("bulk0", "bulk1")]
        images = {record.job.id: await harness.pixels(record) for record in records}
        await harness.ended("queued")
    assert [record.state for record in records] == [State.SUCCEEDED] * 3
    assert {record.batching.forwards for record in records[1:]} == {LONG}, "no step of the batch was computed twice"
    solo = EngineHarness(a_spec(tiny_models / "sd", max_batch=2))
    with solo.started():
        for job in (batch[0], interactive):
            solo.submit(job)
            solo.recorder.wait_for([job.id])
            assert np.abs(solo.recorder.images[job.id, 0].astype(int) - images[job.id]).max() <= 1


async def expire_a_running_job(harness: WorkerHarness) -> str:
    """Return a job whose deadline passed while it ran; tries again when the job had not started.

    No job of its size ends, so that the queue learns no time by which it would expire before its start.
    """
    for number in range(5):
        name = f"expires-{number}"
        await harness.submit(a_job(name, steps=900, time_limit_ms=1500, width=96))
        (record,) = await harness.ended(name)
        if record.progress.step > 0:
            break
    return name


async def test_jobs_that_end_early_free_their_slots_without_affecting_others(start_worker: Callable[[], Any]) -> None:
    """One job is canceled, one expires while running, one while queued, one overflows: two succeed."""
    async with start_worker() as harness:
        await harness.submit(a_job("canceled", steps=900), a_job("stays", steps=30))
        await harness.running("canceled")
        await harness.submit(
            a_job("expires-queued", time_limit_ms=1),
            a_job("overflows", guidance_scale=1e38),
            a_job("follows", steps=3),
        )
        assert await harness.queue.jobs.cancel("canceled")
        await harness.ended("canceled", "stays", "expires-queued", "overflows", "follows")
        expired = await expire_a_running_job(harness)
        ended = {name: await harness.record(name) for name in ("canceled", "expires-queued", "overflows", expired)}
        states = [(await harness.record(name)).state for name in ("stays", "follows")]
    assert states == [State.SUCCEEDED] * 2
    assert ended["canceled"].state is State.CANCELED
    assert ended["expires-queued"].state is ended[expired].state is State.EXPIRED
    assert ended["expires-queued"].progress.step == 0
    assert 0 < ended[expired].progress.step < 900
    error = ended["overflows"].error
    assert error is not None
    assert error.code == "non_finite_latents"
