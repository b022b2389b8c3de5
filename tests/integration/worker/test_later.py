"""Idle workers, or the chores without any, queue the jobs for later that are due."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from harness.queue import claim_ids, come_due, put, redis_ms
from harness.stub_engine import StubFleet

from api.chores import maintenance
from shared.job import Job, State
from shared.queue import Queue, Submission
from shared.runtime.clock import now_ms

Eventually = Callable[..., Awaitable[None]]


async def test_idle_workers_start_jobs_for_later_when_they_are_due(
    queue: Queue, tmp_path: Path, make_job: Callable[..., Job], eventually: Eventually
) -> None:
    fleet = StubFleet(queue, tmp_path)
    async with fleet.worker("demo", job_s=0.01), fleet.worker("demo", job_s=0.01):
        first_ms = int(await redis_ms(queue)) + 300
        jobs = [make_job(not_before_ms=first_ms + 20 * number) for number in range(40)]
        for job in jobs:
            await fleet.submit(job)

        async def ended() -> bool:
            records = await queue.jobs.get_many([job.id for job in jobs])
            return all(record is not None and record.state is State.SUCCEEDED for record in records)

        await eventually(ended, "the jobs for later have run")
    await fleet.close()
    for job, record in zip(jobs, await queue.jobs.get_many([job.id for job in jobs]), strict=True):
        assert record is not None
        assert (record.attempts, record.waits) == (1, False)
        assert job.not_before_ms is not None
        assert (record.started_at_ms or 0) >= job.not_before_ms


async def test_the_chores_queue_due_jobs_without_a_worker(
    queue: Queue, make_submission: Callable[..., Submission], monkeypatch: pytest.MonkeyPatch
) -> None:
    (job_id,) = await put(queue, make_submission(not_before_ms=now_ms() + 3_600_000))
    monkeypatch.setattr(maintenance.settings, "load", lambda: queue.client.settings)
    await asyncio.to_thread(maintenance.move_on)
    assert await claim_ids(queue) == []
    await come_due(queue, job_id)
    assert await asyncio.to_thread(maintenance.move_on) == 1
    assert await claim_ids(queue) == [job_id]
