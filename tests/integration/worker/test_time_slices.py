"""A long job that gives way to a job of another model, with a real engine that has memory for one model."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import structlog
from harness.engine import a_job, a_spec
from harness.queue import put

from shared.config.catalog import Catalog
from shared.job import State
from shared.job_fields import Priority
from shared.job_record import JobRecord
from shared.queue import Queue, Submission
from shared.signature import signature
from shared.storage import connect
from worker.claims import time_slices
from worker.engine.engine import Engine
from worker.engine.pipelines.loading import locate
from worker.worker import Worker

STEPS = 400
SLICE_S = 0.5


@pytest.mark.parametrize(
    "case",
    [(0.0, Priority.INTERACTIVE), (SLICE_S, Priority.INTERACTIVE), (SLICE_S, Priority.STANDARD)],
)
@pytest.mark.usefixtures("quick_loads")
async def test_a_job_of_another_model_runs_before_a_long_one_ends(
    queue_with: Callable[..., Queue],
    tiny_models: Path,
    tmp_path: Path,
    eventually: Callable[..., Awaitable[None]],
    monkeypatch: pytest.MonkeyPatch,
    case: tuple[float, Priority],
) -> None:
    """The long job goes on at its step afterwards. Without slices it runs to its end first.

    The other job has a higher priority, or the same.
    """
    slice_s, priority = case
    monkeypatch.setattr(time_slices, "CHECK_EVERY_S", 0.05)
    queue = queue_with(overdue_ms=50)
    slow = a_spec(tiny_models / "sd", "slow", slice_s=slice_s)
    specs = (slow, a_spec(tiny_models / "sd", "quick"))
    _, nbytes = locate(slow)
    changes = {"storage_dir": tmp_path, "device": "cpu", "torch_threads": 1, "gpu_memory_bytes": nbytes * 3 // 2}
    settings = queue.client.settings.model_copy(update=changes)
    storage = connect(settings)

    async def record(job_id: str) -> JobRecord:
        found = await queue.jobs.get(job_id)
        assert found is not None
        return found

    async def has_run_alone() -> bool:
        return (await record("long")).progress.step > STEPS // 8

    async def ended(job_id: str) -> bool:
        return (await record(job_id)).state.terminal

    async def submit(job_id: str, **fields: object) -> None:
        job = a_job(job_id, **fields)
        await put(queue, Submission(job, signature(job), 0, 1))

    await submit("long", model="slow", steps=STEPS)
    worker = Worker(Catalog(specs), queue, storage, settings, Engine)
    with structlog.testing.capture_logs() as logs:
        running = asyncio.create_task(worker.run())
        await eventually(has_run_alone, "the long job runs", 60)
        assert (await record("long")).epoch == 1, "it is put aside for nobody"
        await submit("short", model="quick", steps=2, priority=priority)
        await eventually(lambda: ended("short"), "the short job has ended", 60)
        long_ended = (await record("long")).state.terminal
        await eventually(lambda: ended("long"), "the long job has ended", 60)
        worker.drain()
        assert await running == 0
    await storage.close()
    long, short = await record("long"), await record("short")
    assert (long.state, short.state) == (State.SUCCEEDED, State.SUCCEEDED)
    assert long_ended == (not slice_s)
    put_aside = [line for line in logs if line["event"] == "batch_put_aside"]
    assert len(put_aside) == (1 if slice_s else 0), "the long job was put aside once"
    assert (long.epoch, long.attempts, long.losses) == (2 if slice_s else 1, 1, 0)
    assert (long.resumed_steps > 0) == bool(slice_s)
