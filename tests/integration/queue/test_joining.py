"""Batch mates for a running batch, solo jobs, and wake-ups."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from harness.queue import MODELS, a_moment, claim, claim_ids, end, lose, put, redis_ms

from shared.auth import TenantLimits
from shared.job_fields import Priority
from shared.queue import Queue, Submission, WorkerInfo

Make = Callable[..., Submission]
LONG_MS = 60_000


async def waits(queue: Queue, worker: str = "w1", **options: Any) -> None:
    await queue.wakeups.list_as_waiting(worker, options.pop("models", MODELS), wait_s=60, **options)


async def woken(queue: Queue, worker: str = "w1") -> str:
    """Wait for a wake-up; repeat a wait that a pause of this machine has outlasted."""
    async with asyncio.timeout(60):
        while (wakeup := await queue.wakeups.wait(worker, 2)) is None:
            pass
    return wakeup


async def is_woken(queue: Queue, worker: str = "w1") -> bool:
    return await queue.wakeups.wait(worker, 0.02) is not None


async def test_a_running_batch_takes_jobs_ready_or_not(queue: Queue, make_submission: Make) -> None:
    """Readiness only gates the start."""
    await put(queue, make_submission(window_ms=LONG_MS))
    (running,) = await claim(queue)
    ids = await put(queue, make_submission(window_ms=LONG_MS), make_submission(window_ms=LONG_MS))
    assert await claim(queue) == []
    joined = await queue.claims.join("w1", running.signature, 1, models=MODELS)
    assert [one.job.id for one in joined] == ids[:1]
    assert await queue.claims.join("w1", running.signature, 0, models=MODELS) == []


async def test_joining_takes_its_own_signature_only(queue: Queue, make_submission: Make) -> None:
    """Nothing of another one, and nothing where nothing is known."""
    await put(queue, make_submission(width=128))
    overdue: list[str] = []
    options: Any = {"models": MODELS, "on_overdue": overdue.append}
    assert await queue.claims.join("w1", make_submission(width=64).signature, 8, **options) == []
    assert overdue == [], "nothing of it waits"


async def test_joining_stops_while_another_signature_is_overdue(
    queue_with: Callable[..., Queue], make_submission: Make
) -> None:
    """One popular signature cannot keep the worker for ever."""
    queue = queue_with(overdue_ms=LONG_MS)
    later = queue_with(namespace=queue.client.settings.namespace, overdue_ms=1)
    await put(queue, make_submission(width=64))
    (running,) = await claim(queue)
    await put(queue, make_submission(width=128))
    ids = await put(queue, *[make_submission(width=64) for _ in range(3)])
    joined = await queue.claims.join("w1", running.signature, 1, models=MODELS)
    assert [one.job.id for one in joined] == ids[:1]
    await a_moment(5)
    overdue: list[str] = []
    options: Any = {"models": MODELS, "on_overdue": overdue.append}
    assert await later.claims.join("w1", running.signature, 8, **options) == []
    assert overdue == [running.signature]
    (urgent,) = await put(queue, make_submission(width=64, priority=Priority.INTERACTIVE))
    joined = await later.claims.join("w1", running.signature, 8, models=MODELS)
    assert [one.job.id for one in joined] == [urgent]  # it would go first in any case
    await claim(queue)
    assert len(await later.claims.join("w1", running.signature, 8, models=MODELS)) == 2


async def test_tenants_that_cannot_join_are_read_once(
    queue_with: Callable[..., Queue], make_submission: Make, scripts: Counter[str]
) -> None:
    """Interactive jobs could join, standard ones not: before, all pages of their tenants were read."""
    queue = queue_with(overdue_ms=1)
    await put(queue, make_submission(width=64))
    (running,) = await claim(queue)
    await put(queue, make_submission(width=128, tenant="other"))
    await put(queue, *[make_submission(width=64, tenant=f"tenant-{at}") for at in range(100)])
    await a_moment(5)
    scripts.clear()
    assert await queue.claims.join("w1", running.signature, 8, models=MODELS) == []
    assert scripts["read_lanes"] == 1


async def test_another_models_overdue_jobs_are_not_this_workers_matter(
    queue_with: Callable[..., Queue], make_submission: Make
) -> None:
    """Only models that the worker serves count."""
    queue = queue_with(overdue_ms=20)
    await put(queue, make_submission(model="other"), make_submission())
    (running,) = await claim(queue)
    await put(queue, make_submission())
    await a_moment(30)
    assert len(await queue.claims.join("w1", running.signature, 8, models=MODELS)) == 1


async def test_a_lost_job_comes_solo(queue_with: Callable[..., Queue], make_submission: Make) -> None:
    """It runs solo from its claim on, and joins no batch."""
    queue = queue_with(overdue_ms=LONG_MS)
    ids = await put(queue, *[make_submission() for _ in range(3)])
    await claim(queue, 1)
    await lose(queue, ids[0])
    assert await queue.maintenance.reclaim() == [ids[0]]
    joined = await queue.claims.join("w2", make_submission().signature, 1, models=MODELS)
    assert [one.job.id for one in joined] == [ids[1]]
    (again,) = await claim(queue, 8, "w2")
    assert (again.job.id, again.must_run_solo, again.epoch) == (ids[0], True, 2)
    (last,) = await claim(queue, 8, "w2")
    assert (last.job.id, last.must_run_solo) == (ids[2], False)


async def test_a_lost_job_is_not_kept_waiting_by_joiners(
    queue_with: Callable[..., Queue], make_submission: Make
) -> None:
    """It joins no batch: after overdue_ms no other job joins either, and the batch ends."""
    queue = queue_with(overdue_ms=LONG_MS)
    later = queue_with(namespace=queue.client.settings.namespace, overdue_ms=1)
    lost, _ = await put(queue, make_submission(), make_submission())
    await claim(queue, 1, "dies")
    (running,) = await claim(queue, 1)
    await lose(queue, lost)
    await queue.maintenance.reclaim()
    await put(queue, *[make_submission() for _ in range(3)])
    assert len(await queue.claims.join("w1", running.signature, 1, models=MODELS)) == 1
    await a_moment(5)
    assert await later.claims.join("w1", running.signature, 1, models=MODELS) == []


async def test_a_lost_bulk_job_lets_urgent_ones_pass_for_a_while(
    queue_with: Callable[..., Queue], make_submission: Make
) -> None:
    """Priority holds, but not for longer than overdue_ms."""
    queue = queue_with(overdue_ms=LONG_MS)
    later = queue_with(namespace=queue.client.settings.namespace, overdue_ms=1)
    (bulk,) = await put(queue, make_submission(priority=Priority.BULK))
    await claim(queue)
    await lose(queue, bulk)
    await queue.maintenance.reclaim()
    urgent = await put(queue, *[make_submission(priority=Priority.INTERACTIVE) for _ in range(2)])
    assert await claim_ids(queue, 1) == urgent[:1]
    await a_moment(5)
    assert await claim_ids(later, 1) == [bulk]


async def test_a_submit_wakes_a_waiting_worker(queue: Queue, make_submission: Make) -> None:
    """At once if it is blocked, and otherwise when it next waits for its wake-up."""
    await waits(queue)
    waiting = asyncio.create_task(woken(queue))
    await a_moment(20)
    assert not waiting.done()
    await put(queue, make_submission())
    await waiting
    await claim(queue)
    await waits(queue)
    await put(queue, make_submission())
    assert await is_woken(queue)


async def test_a_submit_wakes_one_worker(queue: Queue, make_submission: Make) -> None:
    """First that with the job's model in memory, then by the length of the wait; not one for other models."""
    await waits(queue, "other", models=["other"])
    await waits(queue, "loads", models={"demo": 500})
    await a_moment(5)
    await waits(queue, "first")
    await a_moment(5)
    await waits(queue, "second")
    for worker, width in (("first", 64), ("second", 128), ("loads", 192)):
        await put(queue, make_submission(width=width))
        woken_ones = [name for name in ("other", "loads", "first", "second") if await is_woken(queue, name)]
        assert woken_ones == [worker]
    await put(queue, make_submission(width=256))
    assert not await is_woken(queue, "other")


async def test_a_busy_worker_is_woken_for_what_it_has_room_for(queue: Queue, make_submission: Make) -> None:
    """For its signature before an idle worker; for interactive jobs of its models after one."""
    await put(queue, make_submission())
    (running,) = await claim(queue)
    await waits(queue, "w1", idle=False, signature=running.signature)
    await waits(queue, "idle")
    await put(queue, make_submission())
    assert (await is_woken(queue, "w1"), await is_woken(queue, "idle")) == (True, False)
    await waits(queue, "w1", idle=False)
    await put(queue, make_submission(width=128, priority=Priority.INTERACTIVE))
    assert (await is_woken(queue, "w1"), await is_woken(queue, "idle")) == (False, True)
    await put(queue, make_submission(width=192))
    assert not await is_woken(queue, "w1")
    await put(queue, make_submission(width=256, priority=Priority.INTERACTIVE))
    assert await is_woken(queue, "w1")


async def test_a_claim_that_leaves_ready_jobs_wakes_another_worker(queue: Queue, make_submission: Make) -> None:
    """A worker that has claimed waits no more."""
    await waits(queue, "w1")
    await a_moment(5)
    await waits(queue, "w2")
    await put(queue, *[make_submission() for _ in range(12)])
    assert await is_woken(queue, "w1")
    assert len(await claim(queue, worker="w1")) == 8
    assert await is_woken(queue, "w2")
    await waits(queue, "w3")
    assert len(await claim(queue, worker="w2")) == 4
    assert not await is_woken(queue, "w3")


async def test_a_wakeup_is_passed_on_twice_at_most(queue: Queue, make_submission: Make) -> None:
    """A job that no worker can claim does not go round."""
    for worker in ("w1", "w2", "w3", "w4"):
        await waits(queue, worker)
        await a_moment(5)
    await put(queue, make_submission())
    for worker in ("w1", "w2", "w3"):
        await waits(queue, worker, unused=[await woken(queue, worker)])
    assert not await is_woken(queue, "w4")


async def test_a_wakeup_for_jobs_that_are_gone_is_not_passed_on(queue: Queue, make_submission: Make) -> None:
    await waits(queue, "w1")
    await a_moment(5)
    await waits(queue, "w2")
    await put(queue, make_submission())
    wakeup = await woken(queue, "w1")
    assert len(await claim(queue, worker="faster")) == 1
    await waits(queue, "w1", unused=[wakeup])
    assert not await is_woken(queue, "w2")


async def test_a_worker_without_heartbeats_is_not_woken(queue: Queue, make_submission: Make) -> None:
    """A crashed worker that is listed would take the wake-up with it."""
    await queue.workers.heartbeat(WorkerInfo(id="crashed", models=MODELS))
    await queue.client.redis.zadd(queue.client.redis_keys.workers, {"crashed": await redis_ms(queue) - 5000})
    await waits(queue, "crashed")
    await waits(queue, "alive", models={"demo": 500})
    await put(queue, make_submission())
    assert (await is_woken(queue, "crashed"), await is_woken(queue, "alive")) == (False, True)


async def test_a_wait_ends_by_itself(queue: Queue) -> None:
    """At its timeout, without a wake-up."""
    await waits(queue)
    took_s: list[float] = []
    while not took_s or (took_s[-1] >= 1 and len(took_s) < 5):  # again where the machine paused meanwhile
        began = asyncio.get_running_loop().time()
        assert await queue.wakeups.wait("w1", 0.05) is None
        took_s.append(asyncio.get_running_loop().time() - began)
    assert 0.03 < took_s[-1] < 1


async def test_a_submit_that_changes_nothing_wakes_no_worker(queue: Queue, make_submission: Make) -> None:
    """Workers that cannot claim more are not woken."""
    await put(queue, make_submission())
    await waits(queue)
    await put(queue, make_submission())
    assert not await is_woken(queue)


async def test_a_worker_with_other_jobs_is_given_no_lost_one(queue: Queue, make_submission: Make) -> None:
    """It takes what others wait there, and the lost job is left to a worker that is free."""
    lost, other = await put(queue, *[make_submission(priority=Priority.INTERACTIVE) for _ in range(2)])
    await claim(queue, 1, "dies")
    await lose(queue, lost)
    await queue.maintenance.reclaim()
    urgent = {"min_priority": Priority.INTERACTIVE}
    assert await claim_ids(queue, has_other_jobs=True, **urgent) == [other]
    assert await claim_ids(queue, has_other_jobs=True, **urgent) == []
    assert await claim_ids(queue, worker="w2") == [lost]


async def test_only_claimable_priorities_count_for_readiness(queue: Queue, make_submission: Make) -> None:
    """A full worker asks when interactive jobs are ready: bulk ones would keep it polling."""
    await put(queue, make_submission(priority=Priority.BULK))
    assert await queue.claims.next_ready_ms(MODELS) == 0
    assert await queue.claims.next_ready_ms(MODELS, min_priority=Priority.INTERACTIVE) is None
    await put(queue, make_submission(priority=Priority.INTERACTIVE, width=128))
    assert await queue.claims.next_ready_ms(MODELS, min_priority=Priority.INTERACTIVE) == 0


async def mean_rows(queue: Queue, signature: str, joins: int, slots: int = 8) -> float:
    """Run a batch of `signature` in which one job ends between two joins; return the mean number of its jobs."""
    batch = await claim(queue, slots)
    assert {one.signature for one in batch} == {signature}
    rows = [len(batch)]
    for _ in range(joins):
        await end(queue, batch.pop(0), device_seconds=0.1)
        batch += await queue.claims.join("w1", signature, slots - len(batch), models=MODELS)
        rows.append(len(batch))
    return sum(rows) / len(rows)


async def test_a_batch_stays_full_while_the_next_claim_would_return_its_signature(
    queue_with: Callable[..., Queue], make_submission: Make
) -> None:
    """A job of another signature is overdue, but those of the batch came before it."""
    queue = queue_with(overdue_ms=1)
    await put(queue, *[make_submission(width=64) for _ in range(60)])
    await a_moment(5)
    await put(queue, make_submission(width=128))
    await a_moment(5)
    assert await mean_rows(queue, make_submission(width=64).signature, 40) == 8.0


@pytest.mark.parametrize(("tenant", "joined"), [("batch", 2), ("other", 0)])
async def test_a_batch_ends_for_a_less_served_tenant_only(
    tenant: str, joined: int, queue_with: Callable[..., Queue], make_submission: Make
) -> None:
    """Another tenant's overdue job came later; the next claim would choose it."""
    queue = queue_with(overdue_ms=1)
    await put(queue, *[make_submission(tenant="batch") for _ in range(8)])
    (running,) = await claim(queue, 1)
    await a_moment(5)
    await put(queue, make_submission(tenant=tenant, width=128))
    await a_moment(5)
    assert len(await queue.claims.join("w1", running.signature, 2, models=MODELS)) == joined
    other = await claim(queue, 1)
    assert [one.signature == running.signature for one in other] == [bool(joined)]


async def test_a_batch_ends_for_bulk_that_is_due(queue_with: Callable[..., Queue], make_submission: Make) -> None:
    """After nine slots of standard jobs, one of bulk jobs is due."""
    queue = queue_with(overdue_ms=1)
    await put(queue, make_submission(width=128, priority=Priority.BULK))
    await put(queue, *[make_submission() for _ in range(24)])
    await a_moment(5)
    batch = await claim(queue, 8)
    signature = batch[0].signature
    assert len(await queue.claims.join("w1", signature, 8, models=MODELS)) == 8
    assert await queue.claims.join("w1", signature, 8, models=MODELS) == []
    assert [one.job.priority for one in await claim(queue, 8)] == [Priority.BULK]
    assert len(await queue.claims.join("w1", signature, 8, models=MODELS)) == 8


async def test_an_idle_worker_keeps_a_wake_up_until_its_jobs_are_ready(queue: Queue, make_submission: Make) -> None:
    """Then it claims them; a worker that is busy by then, or stops, passes the wake-up on."""
    await put(queue, make_submission(window_ms=LONG_MS))
    await claim(queue, worker="w0")
    await waits(queue)
    await put(queue, make_submission(window_ms=LONG_MS))
    wakeup = await woken(queue)
    listed = await queue.wakeups.list_as_waiting("w1", MODELS, wait_s=60, unused=[wakeup, wakeup])
    assert listed.kept == (wakeup,)
    await queue.wakeups.stop_waiting("w1")
    await waits(queue, "w2")
    listed = await queue.wakeups.list_as_waiting("w1", (), wait_s=60, idle=False, signature="other", unused=listed.kept)
    assert listed.kept == ()
    assert await woken(queue, "w2")


@pytest.mark.parametrize(("priority", "idle", "expected"), [(0, False, True), (1, False, False), (0, True, False)])
async def test_a_busy_worker_that_is_listed_learns_of_interactive_jobs(
    queue: Queue, make_submission: Make, priority: int, idle: bool, expected: bool
) -> None:
    """They may have been queued while it was not listed."""
    await put(queue, make_submission(priority=[Priority.INTERACTIVE, Priority.STANDARD][priority]))
    listed = await queue.wakeups.list_as_waiting("w1", MODELS, wait_s=60, idle=idle)
    assert listed.has_interactive is expected


async def test_jobs_that_a_worker_could_claim_are_overdue(
    queue_with: Callable[..., Queue], make_submission: Make
) -> None:
    queue = queue_with(overdue_ms=1)

    async def overdue(min_priority: Priority = Priority.BULK, model: str = "demo") -> bool:
        return await queue.claims.has_overdue("w1", [model], min_priority, 8)

    assert not await overdue()
    (job_id,) = await put(queue, make_submission(priority=Priority.STANDARD))
    await a_moment(5)
    assert await overdue()
    assert await overdue(Priority.STANDARD)
    assert not await overdue(Priority.INTERACTIVE)
    assert not await overdue(model="other")
    await queue.jobs.pause(job_id)
    assert not await overdue()


@pytest.mark.parametrize(
    ("fields", "starts"),
    [({"n": 2}, False), ({}, True), ({"n": 2, "tenant": "b"}, True), ({"n": 9, "tenant": "b"}, False)],
    ids=["above its tenant's limit", "within it", "of another tenant", "too large for the worker"],
)
async def test_overdue_jobs_that_cannot_start_put_no_batch_aside(
    queue_with: Callable[..., Queue], make_submission: Make, fields: dict[str, Any], starts: bool
) -> None:
    queue = queue_with(overdue_ms=1)
    await queue.api_keys.set_limits("a", TenantLimits(running_slots=3))
    await put(queue, make_submission(tenant="a", n=2))
    assert await claim(queue, worker="w2")
    await put(queue, make_submission(**{"tenant": "a"} | fields))
    await a_moment(5)
    assert await queue.claims.has_overdue("w1", MODELS, Priority.BULK, 8) is starts
    assert bool(await claim(queue)) is starts


async def test_a_job_is_not_overdue_before_its_time(queue_with: Callable[..., Queue], make_submission: Make) -> None:
    queue = queue_with(overdue_ms=LONG_MS)
    await put(queue, make_submission())
    assert not await queue.claims.has_overdue("w1", MODELS, Priority.BULK, 8)
