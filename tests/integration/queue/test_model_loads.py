"""Several models on several workers: few loads, no signature waits forever, and autoscaling from measured costs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness.http_server import serving
from harness.queue import a_moment, claim, end, put, redis_ms

from shared.job import State
from shared.job_fields import Priority
from shared.job_record import BatchingStats, Outcome
from shared.queue import Queue, Submission, WorkerInfo

Make = Callable[..., Submission]
LONG_MS = 60_000


def models(**loads_ms: int) -> dict[str, int]:
    """The models of a worker: `models(here=0, there=500)`."""
    return loads_ms


async def claimed(queue: Queue, worker: str, loads_ms: dict[str, int], slots: int = 8) -> list[str]:
    return [one.job.model for one in await queue.claims.claim(worker, loads_ms, slots)]


async def holds(queue: Queue, worker: str, *names: str) -> None:
    await queue.workers.heartbeat(WorkerInfo(id=worker, models=names), names)
    for name in names:
        await goes_on(queue, worker, name)


async def goes_on(queue: Queue, worker: str, model: str) -> None:
    """Renew that a worker holds a model, for as long as a time ahead counts."""
    later = round(await redis_ms(queue)) + 2_500
    assert (
        await queue.client.redis.zadd(queue.client.redis_keys.model_holders(model), {worker: later}, xx=True, ch=True)
        == 1
    )


async def test_loaded_models_go_first(queue: Queue, make_submission: Make) -> None:
    """Another model's job came earlier; it follows, since an idle GPU is worth a load."""
    await put(queue, make_submission(model="there"))
    await put(queue, make_submission(model="here"))
    worker = models(here=0, there=LONG_MS)
    assert await claimed(queue, "w1", worker) == ["here"]
    assert await claimed(queue, "w1", worker) == ["there"]


async def test_an_old_signature_goes_before_loaded_models(queue: Queue, make_submission: Make) -> None:
    """A signature to be loaded is ordered later by some load times only: one model's jobs starve no other."""
    await put(queue, make_submission(model="there"))
    await a_moment(20)
    await put(queue, make_submission(model="here"))
    assert await claimed(queue, "w1", models(here=0, there=1)) == ["there"]


async def test_a_higher_priority_is_worth_a_load(queue: Queue, make_submission: Make) -> None:
    """Priorities come before memory."""
    await put(queue, make_submission(model="here"), make_submission(model="there", priority=Priority.INTERACTIVE))
    assert await claimed(queue, "w1", models(here=0, there=LONG_MS)) == ["there"]


async def test_a_model_of_another_worker_is_left_to_it(queue: Queue, make_submission: Make) -> None:
    """An idle worker does not load what another one holds; it learns when to look again."""
    await put(queue, make_submission(model="there"))
    await holds(queue, "w2", "there")
    idle = models(here=0, there=LONG_MS)
    assert await claimed(queue, "w1", idle) == []
    assert LONG_MS / 2 < (await queue.claims.next_ready_ms(idle, worker="w1") or 0) <= LONG_MS
    assert await queue.claims.next_ready_ms(models(there=0), worker="w2") == 0
    assert await claimed(queue, "w2", models(there=0)) == ["there"]


async def test_it_is_left_no_longer_than_a_load_takes(queue: Queue, make_submission: Make) -> None:
    """By then the load would have been worth it, whatever delays the other worker."""
    await put(queue, make_submission(model="there"))
    await holds(queue, "w2", "there")
    await a_moment(20)
    assert await queue.claims.next_ready_ms(models(there=1), worker="w1") == 0
    assert await claimed(queue, "w1", models(there=1)) == ["there"]


async def test_a_worker_that_fell_silent_holds_nothing(queue: Queue, make_submission: Make) -> None:
    """Dead, or without Redis: its jobs are not left to it."""
    await put(queue, make_submission(model="there"))
    await holds(queue, "w2", "there")
    seconds, _ = await queue.client.redis.time()
    await queue.client.redis.zadd(queue.client.redis_keys.model_holders("there"), {"w2": 1000 * (seconds - 4)})
    assert await claimed(queue, "w1", models(there=LONG_MS)) == ["there"]


async def test_a_claim_holds_its_model_before_it_is_loaded(queue: Queue, make_submission: Make) -> None:
    """Otherwise each idle worker would load it for a few jobs of the same burst."""
    await put(queue, *(make_submission(model="there") for _ in range(4)))
    assert await claimed(queue, "w1", models(there=LONG_MS), slots=2) == ["there"] * 2
    await goes_on(queue, "w1", "there")
    assert await claimed(queue, "w2", models(there=LONG_MS), slots=2) == []
    assert await claimed(queue, "w1", models(there=LONG_MS), slots=2) == ["there"] * 2, "its own claim is no other's"


async def test_nothing_is_left_to_a_worker_that_cannot_load_it(queue: Queue, make_submission: Make) -> None:
    """Otherwise a worker with a broken disk would attract a model's jobs and fail them all."""
    await put(queue, *(make_submission(model="there") for _ in range(4)))
    assert await claimed(queue, "w1", models(there=-LONG_MS), slots=2) == ["there"] * 2
    assert await claimed(queue, "w2", models(there=LONG_MS), slots=1) == ["there"]
    await goes_on(queue, "w2", "there")
    assert await claimed(queue, "w1", models(there=-LONG_MS), slots=1) == [], "the other one can, so it does"


async def test_a_long_queue_is_worth_a_second_worker(queue: Queue, make_submission: Make) -> None:
    """Eight jobs of 60 GPU-seconds each are more than a load."""
    await put(queue, make_submission(model="there"))
    (one,) = await queue.claims.claim("w2", ["there"], 1)
    assert await end(queue, one, "w2", device_seconds=60.0)
    await goes_on(queue, "w2", "there")
    await put(queue, *(make_submission(model="there") for _ in range(8)))
    assert await claimed(queue, "w1", models(there=8 * LONG_MS), slots=1) == []
    assert await claimed(queue, "w1", models(there=8 * LONG_MS - 1), slots=1) == ["there"]


@pytest.mark.parametrize(("load_ms", "joined"), [(0, 0), (1, 0), (LONG_MS, 1)])
async def test_a_batch_ends_for_another_model_only_when_that_is_next(
    load_ms: int, joined: int, queue_with: Callable[..., Queue], make_submission: Make
) -> None:
    """Overdue in memory, overdue by a load time, and not yet."""
    queue = queue_with(overdue_ms=20)
    await put(queue, make_submission(model="here"))
    worker = models(here=0, there=load_ms)
    (running,) = await queue.claims.claim("w1", worker, 1)
    await put(queue, make_submission(model="there"))
    await a_moment(40)
    await put(queue, make_submission(model="here"))
    assert len(await queue.claims.join("w1", running.signature, 8, models=worker)) == joined


async def test_a_batch_continues_while_its_own_jobs_are_older(
    queue_with: Callable[..., Queue], make_submission: Make
) -> None:
    """The next claim would choose its own signature: ending the batch would gain nothing."""
    queue = queue_with(overdue_ms=20)
    await put(queue, make_submission(model="here"))
    worker = models(here=0, there=1)
    (running,) = await queue.claims.claim("w1", worker, 1)
    await put(queue, make_submission(model="here"))
    await put(queue, make_submission(model="there"))
    await a_moment(40)
    assert len(await queue.claims.join("w1", running.signature, 8, models=worker)) == 1


async def test_the_scale_follows_the_cost_of_jobs_in_a_batch(
    queue: Queue, make_submission: Any, tmp_path: Path
) -> None:
    """A job that cost 40 GPU-seconds solo costs ten if four share a batch: eight queued ones are 80 s, not 320.

    Two workers start them all at once, four each."""
    async with serving(queue, tmp_path, target_wait_s=20.0) as api:
        assert (await api.get("/v1/scale/other")).status_code == 404
        empty = (await api.get(f"/v1/scale/{queue.client.settings.namespace}")).json()
        assert (empty["wanted"], empty["reasons"]) == (0, ["no jobs are queued or running"])
        await put(queue, make_submission())
        (one,) = await claim(queue)
        outcome = Outcome(state=State.SUCCEEDED, batching=BatchingStats(forwards=4, mean_rows=1.0), device_seconds=40.0)
        assert await queue.claims.settle("w1", one.job.id, one.epoch, outcome)
        job = one.job
        for rows, seconds in ((1, 1.0), (4, 1.0)):
            await queue.workers.learn_cost("cpu", job.model, f"{job.width}x{job.height}", rows, seconds)
        await put(queue, *(make_submission() for _ in range(8)))
        scale = (await api.get(f"/v1/scale/{queue.client.settings.namespace}")).json()
        assert (scale["backlog_s"], scale["wanted"]) == (pytest.approx(80.0), 2)
        await queue.workers.heartbeat(WorkerInfo(id="w1", models=(job.model,), running_jobs=2))
        scale = (await api.get(f"/v1/scale/{queue.client.settings.namespace}")).json()
        assert (scale["alive"], scale["busy"]) == (1, 1)
        await queue.workers.learn_start_time(70.0)
        await queue.workers.learn_start_time(80.0)
        scale = (await api.get(f"/v1/scale/{queue.client.settings.namespace}")).json()
        assert (scale["start_s"], scale["wanted"]) == (pytest.approx(73.0), 1), "a second one would load for too long"
