"""What raises the number of wanted workers (`GET /v1/scale/{namespace}`), and what of the queue it reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.http_server import serving
from harness.queue import claim, end, put

from shared.auth import TenantLimits
from shared.job_fields import Priority
from shared.queue import Queue, Submission, WorkerInfo
from shared.queue.workers import backlog_sample

Make = Callable[..., Submission]
DAY_MS = 86_400_000


async def measured(queue: Queue, make: Make, seconds: float = 10.0, **fields: Any) -> None:
    """End one job, which sets the cost of its model."""
    await put(queue, make(**fields))
    (one,) = await claim(queue, 1)
    await end(queue, one, device_seconds=seconds)


async def scale_of(api: httpx.AsyncClient, queue: Queue) -> dict[str, Any]:
    return dict((await api.get(f"/v1/scale/{queue.client.settings.namespace}")).json())


async def test_bulk_jobs_want_the_workers_that_end_them_within_their_window(
    queue: Queue, make_submission: Make, tmp_path: Path
) -> None:
    """300 of 10 GPU-seconds need one worker for an hour, not 75 for a minute."""
    await measured(queue, make_submission)
    await put(queue, *(make_submission(priority=Priority.BULK) for _ in range(300)))
    async with serving(queue, tmp_path) as api:
        assert (await scale_of(api, queue))["wanted"] == 1
    async with serving(queue, tmp_path, bulk_window_s=600) as api:
        assert (await scale_of(api, queue))["wanted"] in (5, 6)


async def test_a_limited_tenant_wants_no_more_workers_than_its_limit_uses(
    queue: Queue, make_submission: Make, tmp_path: Path
) -> None:
    """However many of its jobs are queued, and while it runs as many as it may."""
    await queue.api_keys.set_limits("small", TenantLimits(running_slots=1))
    await measured(queue, make_submission)
    await put(queue, *(make_submission(tenant="small") for _ in range(300)))
    async with serving(queue, tmp_path) as api:
        assert (await scale_of(api, queue))["wanted"] == 1
        assert len(await claim(queue)) == 1
        await queue.workers.heartbeat(WorkerInfo("w1", ("demo",), running_jobs=1, ready_s=900.0))
        assert (await scale_of(api, queue))["wanted"] == 1
        await put(queue, *(make_submission(tenant="other") for _ in range(9)))
        assert (await scale_of(api, queue))["wanted"] == 3, "nine jobs of another tenant count in full"


@pytest.mark.parametrize("priority", [Priority.STANDARD, Priority.BULK])
async def test_limited_tenants_beyond_those_that_are_read_count_alike(
    queue: Queue, make_submission: Make, monkeypatch: pytest.MonkeyPatch, priority: Priority
) -> None:
    """The split by model is read of some; the number of jobs is that of all."""
    monkeypatch.setattr(backlog_sample, "_ORDERS", 3)
    for tenant in ("one", "two", "three"):
        await queue.api_keys.set_limits(tenant, TenantLimits(running_slots=2))
        jobs = [make_submission(tenant=tenant, n=2, width=64 * (at % 6 + 1), priority=priority) for at in range(12)]
        await put(queue, *jobs)
    await put(queue, make_submission(tenant="free", n=2))
    (read,) = (await queue.workers.backlog(await queue.workers.load(), {})).limited
    assert (read.limit, read.running) == (6, 0)
    slots = read.bulk_slots if priority is Priority.BULK else read.queued_slots
    assert slots == {"demo": pytest.approx(72)}


async def test_a_job_that_no_worker_serves_does_not_raise_the_wanted_workers_at_each_call(
    queue: Queue, make_submission: Make, tmp_path: Path
) -> None:
    await measured(queue, make_submission, seconds=0.01)
    await put(queue, make_submission())
    await asyncio.sleep(0.1)
    seen = []
    async with serving(queue, tmp_path, target_wait_s=0.01) as api:
        for _ in range(8):
            for number in range(seen[-1] if seen else 1):
                await queue.workers.heartbeat(WorkerInfo(f"w{number}", ("other",), ready_s=900.0))
            seen.append((await scale_of(api, queue))["wanted"])
    assert seen == [1] * 8


async def test_a_job_behind_its_tenants_limit_is_not_late(queue: Queue, make_submission: Make, tmp_path: Path) -> None:
    """It waits for the limit, not for a worker."""
    await queue.api_keys.set_limits("small", TenantLimits(running_slots=1))
    await measured(queue, make_submission, seconds=0.01)
    await put(queue, *(make_submission(tenant="small") for _ in range(3)))
    await claim(queue)
    await asyncio.sleep(0.1)
    await queue.workers.heartbeat(WorkerInfo("w1", ("demo",), running_jobs=1, ready_s=900.0))
    async with serving(queue, tmp_path, target_wait_s=0.01) as api:
        assert (await scale_of(api, queue))["wanted"] == 1
        await put(queue, make_submission(tenant="other"))
        await asyncio.sleep(0.1)
        assert (await scale_of(api, queue))["wanted"] == 2


async def test_a_burst_on_a_model_of_unknown_cost_wants_one_worker_until_a_job_has_ended(
    queue: Queue, make_submission: Make, tmp_path: Path
) -> None:
    await put(queue, *(make_submission() for _ in range(300)))
    models = tmp_path / "models.toml"
    text = Path("models.toml").read_text("utf-8").replace('"demo/model"', f'"{Path("demo/model").resolve()}"')
    models.write_text(text.replace("max_batch =", "expected_image_s = 1.0\nmax_batch ="), "utf-8")
    async with serving(queue, tmp_path) as api:
        assert (await scale_of(api, queue))["wanted"] == 1
    async with serving(queue, tmp_path, models=models) as api:
        assert (await scale_of(api, queue))["wanted"] == 10, "by expected_image_s of the model"
        (one,) = await claim(queue, 1)
        await end(queue, one, device_seconds=4.0)
        assert (await scale_of(api, queue))["wanted"] == 36, "by the first job"


async def test_bulk_jobs_with_a_deadline_count_with_the_lines_of_their_batch(
    queue: Queue, make_submission: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample of many is read; most lines of a large batch are still in its file."""
    monkeypatch.setattr(backlog_sample, "_DEADLINES", 10)
    dated = {"priority": Priority.BULK, "time_limit_ms": DAY_MS}
    await put(queue, *(make_submission(batch_id="batch_1", tenant="one", n=2, **dated) for _ in range(50)))
    await put(queue, *(make_submission(tenant="two", time_limit_ms=1000 * at) for at in range(3600, 3630)))
    await put(queue, make_submission(priority=Priority.BULK))
    batch = {"status": "in_progress", "total": 5000, "read": 60}
    await queue.client.redis.hset(queue.client.redis_keys.batch("one", "batch_1"), mapping=batch)
    rows = (await queue.workers.backlog(await queue.workers.load(), {})).dated
    assert {(row.model, row.tenant) for row in rows} == {("demo", "one")}
    assert all(row.due_s == pytest.approx(86_400, abs=120) for row in rows)
    assert sum(row.queued for row in rows) == pytest.approx(100, abs=16)
    assert [row.in_files for row in rows if row.in_files] == [2 * 4940]
    canceled = {**batch, "status": "cancelling"}
    await queue.client.redis.hset(queue.client.redis_keys.batch("one", "batch_1"), mapping=canceled)
    rows = (await queue.workers.backlog(await queue.workers.load(), {})).dated
    assert not any(row.in_files for row in rows)


async def learn_minutes(queue: Queue, signature: str) -> None:
    """Let a step of a signature take a minute."""
    learned = {"device_step_ms": 60_000, "device_rest_ms": 0, "device_run_ms": 480_000, "device_jobs": 4}
    learned["device_at"] = await queue.client.now_ms()
    await queue.client.redis.hset(queue.client.redis_keys.slot_cost(signature), mapping=learned)
    await queue.client.redis.pexpire(queue.client.redis_keys.slot_cost(signature), DAY_MS)


async def test_bulk_jobs_count_by_their_slack(queue: Queue, make_submission: Make) -> None:
    """The time to their latest start, without that which they take."""
    await learn_minutes(queue, make_submission().signature)
    await put(queue, make_submission(priority=Priority.BULK, steps=60, time_limit_ms=DAY_MS))
    (row,) = (await queue.workers.backlog(await queue.workers.load(), {})).dated
    assert row.due_s == pytest.approx(82_800, abs=60)


async def test_a_paused_bulk_job_is_not_due(queue: Queue, make_submission: Make) -> None:
    """Its deadline passes on, but no worker could run it."""
    await learn_minutes(queue, make_submission().signature)
    (job_id,) = await put(queue, make_submission(priority=Priority.BULK, steps=60, time_limit_ms=DAY_MS))
    await queue.jobs.pause(job_id)
    assert (await queue.workers.backlog(await queue.workers.load(), {})).dated == []
    await queue.jobs.resume(job_id)
    assert len((await queue.workers.backlog(await queue.workers.load(), {})).dated) == 1


async def test_late_bulk_jobs_are_due_at_once(
    queue: Queue, make_submission: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queued past their latest start, before they expire: an even sample as of others."""
    monkeypatch.setattr(backlog_sample, "_DEADLINES", 10)
    await learn_minutes(queue, make_submission().signature)
    await put(queue, *(make_submission(priority=Priority.BULK, steps=60, time_limit_ms=60_000) for _ in range(25)))
    await put(queue, *(make_submission(priority=Priority.BULK, steps=60, time_limit_ms=DAY_MS) for _ in range(15)))
    rows = (await queue.workers.backlog(await queue.workers.load(), {})).dated
    assert len(rows) == 10
    assert sum(row.queued for row in rows if row.due_s == 0) == pytest.approx(25, abs=4)
    assert sum(row.queued for row in rows if row.due_s > 80_000) == pytest.approx(15, abs=4)


async def test_workers_with_only_bulk_jobs_are_not_kept_for_a_batch(
    queue: Queue, make_submission: Make, tmp_path: Path
) -> None:
    await measured(queue, make_submission)
    await put(queue, *(make_submission(priority=Priority.BULK) for _ in range(20)))
    busy = WorkerInfo("", ("demo",), running_jobs=4, bulk_jobs=4, ready_s=900.0)
    async with serving(queue, tmp_path) as api:
        for name in ("w1", "w2", "w3"):
            await queue.workers.heartbeat(replace(busy, id=name))
        scale = await scale_of(api, queue)
        assert (scale["busy"], scale["wanted"]) == (3, 1)
        await queue.workers.heartbeat(replace(busy, id="w3", bulk_jobs=3))
        await queue.workers.heartbeat(replace(busy, id="w2", bulk_jobs=3))
        assert (await scale_of(api, queue))["wanted"] == 2
