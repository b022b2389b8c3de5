"""A batch that would lose its steps is not put aside: its checkpoint must be stored first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import structlog
from harness.stub_engine import StubEngine, StubFleet

from shared.job import Job, State
from shared.job_fields import Priority
from shared.queue import Queue
from worker.claims import time_slices

Eventually = Callable[..., Awaitable[None]]
MakeJob = Callable[..., Job]
STATE = b"twelve bytes"


@pytest.fixture
async def fleet(
    queue_with: Callable[..., Queue], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[StubFleet]:
    monkeypatch.setattr(time_slices, "CHECK_EVERY_S", 0.02)
    fleet = StubFleet(queue_with(overdue_ms=1), tmp_path)
    fleet.slice_s["slow"] = 0.1
    yield fleet
    await fleet.close()


async def take_steps(engine: StubEngine, key: str) -> None:
    for step in range(1, 10_000):
        engine.step(key, step, 100_000)
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("is_refused", [False, True])
async def test_a_batch_whose_checkpoints_are_refused_runs_on(
    fleet: StubFleet, make_job: MakeJob, eventually: Eventually, is_refused: bool
) -> None:
    """Otherwise it would begin anew at each slice, and never end while jobs of other models come."""
    slow, quick = make_job(model="slow"), make_job(model="quick", priority=Priority.STANDARD)
    queue, key = fleet.queue, f"{slow.id}:1"
    if is_refused:
        await queue.client.redis.hset(queue.client.redis_keys.tenant_limits, f"{slow.tenant}|stored_bytes", 5)
    await fleet.submit(slow)
    with structlog.testing.capture_logs() as logs:
        async with fleet.worker("slow", "quick") as (_, engine):
            await eventually(lambda: key in engine.requests, "the slow job runs")
            engine.states[key] = (STATE,)
            steps = asyncio.create_task(take_steps(engine, key))
            await fleet.submit(quick)
            if is_refused:
                await eventually(lambda: "checkpoint_not_stored" in _events(logs), "its checkpoint is refused")
                await asyncio.sleep(0.3)  # several checks
                assert "batch_put_aside" not in _events(logs)
                engine.finish(key)
            await eventually(lambda: f"{quick.id}:1" in engine.requests, "the quick job runs")
            steps.cancel()
            engine.finish(f"{quick.id}:1")
            if not is_refused:
                await eventually(lambda: f"{slow.id}:2" in engine.requests, "the slow job goes on")
                assert engine.requests[f"{slow.id}:2"].checkpoints == (STATE,)
                engine.finish(f"{slow.id}:2")
            await eventually(lambda: _succeeded(queue, slow.id), "the slow job has ended")
    assert ("batch_put_aside" in _events(logs)) is not is_refused


def _events(logs: list[structlog.typing.EventDict]) -> set[str]:
    return {line["event"] for line in logs}


async def _succeeded(queue: Queue, job_id: str) -> bool:
    record = await queue.jobs.get(job_id)
    return record is not None and record.state is State.SUCCEEDED
