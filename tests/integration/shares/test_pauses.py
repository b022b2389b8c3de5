"""Paused models, tenants and everything: nothing starts, running jobs run on, and resuming wakes workers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from harness.queue import claim, end, put, state_of

from api.jobs.queue_reason import queue_reason
from shared.autoscaling import Backlog, Fleet, Targets, wanted_workers
from shared.errors import Conflict
from shared.job import State
from shared.job_fields import Priority
from shared.queue import Queue, Submission
from shared.queue.maintenance import pauses
from shared.queue.maintenance.pauses import Pause, PauseKind
from shared.queue.order.position import QueueReason

Make = Callable[..., Submission]
Eventually = Callable[..., Awaitable[None]]
TARGETS = Targets(wait_s=30.0, bulk_window_s=86_400.0)
KINDS = [(PauseKind.ALL, ""), (PauseKind.MODEL, "demo"), (PauseKind.TENANT, "acme")]


async def pause(queue: Queue, kind: PauseKind, name: str = "", reason: str = "") -> None:
    await queue.pauses.set(Pause(kind, name, reason, 0))


async def backlog(queue: Queue) -> Backlog:
    return await queue.workers.backlog(await queue.workers.load(), {})


async def test_nothing_of_a_paused_tenant_or_model_starts(queue: Queue, make_submission: Make) -> None:
    for kind, name in KINDS:
        (first,) = await put(queue, make_submission(tenant="acme"))
        await pause(queue, kind, name)
        assert await claim(queue) == [], kind
        position = await queue.jobs.position(first)
        assert position is not None
        assert queue_reason(position.reason, "demo", []) is QueueReason.PAUSED
        assert await queue.pauses.end(kind, name)
        (one,) = await claim(queue)
        assert one.job.id == first
        await end(queue, one)


async def test_jobs_of_others_start(queue: Queue, make_submission: Make) -> None:
    await pause(queue, PauseKind.TENANT, "acme")
    await put(queue, *[make_submission(tenant=tenant) for tenant in ("acme", "other", "acme")])
    assert [one.job.tenant for one in await claim(queue)] == ["other"]
    assert await claim(queue, worker="w2") == []


async def test_running_jobs_run_on_and_no_job_joins_them(queue: Queue, make_submission: Make) -> None:
    await put(queue, make_submission(tenant="acme"))
    (running,) = await claim(queue)
    for kind, name in KINDS:
        await pause(queue, kind, name)
    (waiting,) = await put(queue, make_submission(tenant="acme"))
    assert not await queue.claims.join("w1", running.signature, 8, models=["demo"])
    assert await end(queue, running)
    assert await state_of(queue, running.job.id) is State.SUCCEEDED
    for kind, name in KINDS:
        assert await claim(queue) == []
        await queue.pauses.end(kind, name)
    assert [one.job.id for one in await claim(queue)] == [waiting]


@pytest.mark.parametrize(("kind", "name"), KINDS)
async def test_resuming_wakes_a_waiting_worker(queue: Queue, make_submission: Make, kind: PauseKind, name: str) -> None:
    await pause(queue, kind, name)
    await put(queue, make_submission(tenant="acme"))
    assert await claim(queue) == []
    assert await queue.claims.next_ready_ms(["demo"], worker="w1") is None, "a worker sleeps meanwhile"
    await queue.client.scripts.list_as_waiting("w1", 60_000, "", True, "", "demo", 0)
    assert await queue.pauses.end(kind, name)
    assert await queue.client.redis.llen(queue.client.redis_keys.wakeup("w1")) == 1
    assert len(await claim(queue)) == 1


@pytest.mark.parametrize(("kind", "name"), KINDS)
async def test_paused_jobs_want_no_worker(queue: Queue, make_submission: Make, kind: PauseKind, name: str) -> None:
    jobs = [make_submission(tenant="acme", priority=priority) for priority in Priority for _ in range(3)]
    await put(queue, *jobs)
    before = await backlog(queue)
    assert sum(load.queued_slots + load.bulk_slots for load in before.loads) == 9
    await pause(queue, kind, name)
    paused = await backlog(queue)
    assert all(load.waiting_s == 0 for load in paused.loads)
    if kind is PauseKind.TENANT:
        (limited,) = paused.limited
        assert (limited.name, limited.limit) == ("acme", 0)
    else:
        assert [depth.paused for depth in await queue.workers.queue_depths()] == [True]
    assert wanted_workers(paused, Fleet(), TARGETS).wanted == 0


async def test_a_job_of_another_tenant_wants_a_worker_beside_those_of_a_paused_one(
    queue: Queue, make_submission: Make
) -> None:
    await pause(queue, PauseKind.TENANT, "acme")
    await put(queue, *[make_submission(tenant="acme") for _ in range(50)])
    assert wanted_workers(await backlog(queue), Fleet(), TARGETS).wanted == 0
    await put(queue, make_submission(tenant="other"))
    assert wanted_workers(await backlog(queue), Fleet(), TARGETS).wanted == 1


async def test_a_deadline_passes_during_a_pause(queue: Queue, make_submission: Make, eventually: Eventually) -> None:
    await pause(queue, PauseKind.ALL)
    (job_id,) = await put(queue, make_submission(time_limit_ms=50))

    async def expired() -> bool:
        await queue.maintenance.expire()
        return await state_of(queue, job_id) is State.EXPIRED

    await eventually(expired, "the job expires")


async def test_pauses_are_listed_and_bounded(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pauses, "MAX_PAUSES", 2)
    await pause(queue, PauseKind.TENANT, "acme", "first")
    await pause(queue, PauseKind.TENANT, "acme", "second")
    await pause(queue, PauseKind.ALL)
    with pytest.raises(Conflict, match="at most 2"):
        await pause(queue, PauseKind.MODEL, "demo")
    listed = (await queue.pauses.all()).by_name
    assert {(kind.value, name): one.reason for (kind, name), one in listed.items()} == {
        ("all", ""): "",
        ("tenant", "acme"): "second",
    }
    for kind, name in list(listed):
        assert await queue.pauses.end(kind, name)
        assert not await queue.pauses.end(kind, name)
