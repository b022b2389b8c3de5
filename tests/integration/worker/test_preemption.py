"""A whole worker on a real Redis: who goes first, who leaves early, and what that does to the others."""

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
from harness.engine import Room, a_job, a_spec
from harness.queue import put
from PIL import Image

from shared.config.models_file import Catalog
from shared.job import Job, JobRecord, Priority, State
from shared.queue import Queue, Submission
from shared.runtime.clock import now_ms
from shared.signature import signature
from shared.storage import connect
from worker.engine.engine import Engine
from worker.engine.fusion import fused_call
from worker.engine.fusion.module_proxy import ParkedCall
from worker.worker import Worker

Eventually = Callable[..., Awaitable[None]]
LONG = 80  # steps: a batch that lasts many times as long as an interactive job takes
EARLY, LATE = 5, 70  # forwards of it, with an interactive job's few among them


class Shop:
    """A worker at work, and the eyes of its clients."""

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

    async def under_way(self, *names: str) -> None:
        """Wait until the jobs' first steps are told."""

        async def all_move() -> bool:
            records = [await self.record(name) for name in names]
            return all(one.state is State.RUNNING and one.progress.step > 0 for one in records)

        await self._eventually(all_move, f"{names} are under way", 60)

    async def ended(self, *names: str) -> list[JobRecord]:
        async def all_ended() -> bool:
            return all([(await self.record(name)).state.terminal for name in names])

        await self._eventually(all_ended, f"{names} have ended", 60)
        return [await self.record(name) for name in names]

    async def pixels(self, record: JobRecord) -> np.ndarray:
        data = await self.storage.read(record.artifacts[0].key)
        return np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)


@pytest.fixture
def shop(queue: Queue, tiny_models: Path, tmp_path: Path, eventually: Eventually) -> Callable[[], Any]:
    @asynccontextmanager
    async def opened() -> AsyncIterator[Shop]:
        made = Shop(queue, tiny_models / "sd", tmp_path, eventually)
        running = asyncio.create_task(made.worker.run())
        try:
            yield made
        finally:
            made.worker.drain()
            assert await running == 0
            await made.storage.close()

    return opened


class Gate:
    """Holds the engine's thread at two forwards until it is let on: a busy machine may run ahead of the loop else."""

    def __init__(self, first: int, second: int) -> None:
        self._forward = fused_call.run_fused
        self._let_on = {first: threading.Event(), second: threading.Event()}
        self._passed = 0
        self.at_work: Shop | None = None

    def forward(self, calls: Sequence[ParkedCall], *more: Any) -> list[Any]:
        if calls[0].shared_method.component == "unet" and self.at_work and self.at_work.worker.slots_in_use:
            self._passed += 1
            if self._passed in self._let_on:
                self._let_on[self._passed].wait(60)
        return self._forward(calls, *more)

    def open(self, at: int | None = None) -> None:
        """Let it on at one of the two; None: at both."""
        for number, let_on in self._let_on.items():
            if at in (None, number):
                let_on.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(EARLY, LATE)
    monkeypatch.setattr(fused_call, "run_fused", made.forward)
    yield made
    made.open()


@pytest.mark.parametrize("width", [64, 96])
async def test_an_interactive_job_starts_within_a_full_bulk_batch(
    width: int, shop: Callable[[], Any], tiny_models: Path, gate: Gate, eventually: Eventually
) -> None:
    """Of the batch's signature or another one: it ends while the batch waits, whose pictures are those of lone runs."""
    batch = [a_job(f"bulk{at}", steps=LONG, priority=Priority.BULK) for at in range(2)]
    urgent = a_job("urgent", steps=3, width=width, priority=Priority.INTERACTIVE)
    async with shop() as at_work, contextlib.AsyncExitStack() as stack:
        stack.callback(gate.open)
        gate.at_work = at_work
        await at_work.submit(*batch, a_job("waits", steps=2, priority=Priority.BULK))
        await at_work.under_way("bulk0", "bulk1")
        await at_work.submit(urgent)
        await eventually(lambda: at_work.worker.slots_in_use == 3, "it is claimed", 60)
        gate.open(EARLY)
        (done,) = await at_work.ended("urgent")
        assert [(await at_work.record(job.id)).state for job in batch] == [State.RUNNING] * 2
        assert (await at_work.record("waits")).state is State.QUEUED, "bulk jobs are not claimed beyond the seats"
        gate.open(LATE)
        records = [done, *await at_work.ended("bulk0", "bulk1")]
        made = {record.job.id: await at_work.pixels(record) for record in records}
        await at_work.ended("waits")
    assert [record.state for record in records] == [State.SUCCEEDED] * 3
    assert {record.batching.forwards for record in records[1:]} == {LONG}, "no step of the batch was computed twice"
    solo = Room(a_spec(tiny_models / "sd", max_batch=2))
    with solo.started():
        for job in (batch[0], urgent):
            solo.seat(job)
            solo.recorder.wait_for([job.id])
            assert np.abs(solo.recorder.pictures[job.id, 0].astype(int) - made[job.id]).max() <= 1


async def out_of_time(at_work: Shop) -> str:
    """Return a job that runs out of time in mid-run; one that was not even begun by then is followed by another."""
    for at in range(5):
        name = f"out-of-time-{at}"
        await at_work.submit(a_job(name, steps=900, deadline_at_ms=now_ms() + 1500))
        (record,) = await at_work.ended(name)
        if record.progress.step > 0:
            break
    return name


async def test_whoever_ends_early_frees_a_seat_and_disturbs_nobody(shop: Callable[[], Any]) -> None:
    """One is canceled, one runs out of time in mid-run, one waits too long, one's latents overflow: two succeed."""
    async with shop() as at_work:
        await at_work.submit(a_job("canceled", steps=900), a_job("stays", steps=30))
        await at_work.under_way("canceled")
        await at_work.submit(
            a_job("waits-too-long", deadline_at_ms=now_ms() + 1),
            a_job("overflows", guidance_scale=1e38),
            a_job("follows", steps=3),
        )
        assert await at_work.queue.jobs.cancel("canceled")
        await at_work.ended("canceled", "stays", "waits-too-long", "overflows", "follows")
        late = await out_of_time(at_work)
        told = {name: await at_work.record(name) for name in ("canceled", "waits-too-long", "overflows", late)}
        states = [(await at_work.record(name)).state for name in ("stays", "follows")]
    assert states == [State.SUCCEEDED] * 2
    assert told["canceled"].state is State.CANCELED
    assert told["waits-too-long"].state is told[late].state is State.EXPIRED
    assert told["waits-too-long"].progress.step == 0
    assert 0 < told[late].progress.step < 900
    error = told["overflows"].error
    assert error is not None
    assert error.code == "non_finite_latents"
