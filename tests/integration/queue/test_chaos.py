"""Workers that die, stall, drain and cancel: every job ends exactly once."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable

import pytest
from harness.queue import MODELS, end, put, state_of

from shared.job import State
from shared.job_fields import Priority
from shared.queue import Claim, Queue, Submission

Make = Callable[..., Submission]
JOBS = 300
WORKERS = 5


class ChaosWorkers:
    """Workers that treat their jobs in every possible way, and record the outcomes."""

    def __init__(self, queue: Queue, random_numbers: random.Random) -> None:
        self.queue = queue
        self.random_numbers = random_numbers
        self.settled: list[str] = []
        self.stale: list[tuple[str, Claim]] = []
        self.done = False

    async def work(self, number: int) -> None:
        lives = 0
        while not self.done:
            lives += 1
            worker = f"w{number}.{lives}"
            claims = await self.queue.claims.claim(worker, MODELS, self.random_numbers.randint(1, 8))
            if claims and not claims[0].must_run_solo and self.random_numbers.random() < 0.3:
                claims += await self.queue.claims.join(worker, claims[0].signature, 4, models=MODELS)
            assert len({one.signature for one in claims}) <= 1
            assert not any(one.must_run_solo for one in claims) or len(claims) == 1
            for one in claims:
                await self.treat(worker, one)
            await asyncio.sleep(0.001 if claims else 0.005)

    async def treat(self, worker: str, one: Claim) -> None:
        fate = self.random_numbers.random()
        if fate < 0.15:
            self.stale.append((worker, one))  # dies with it, or wakes up too late
        elif fate < 0.25:
            await self.queue.claims.release(worker, {one.job.id: one.epoch})
        elif fate < 0.30:
            await self.queue.jobs.cancel(one.job.id)
            renewal = await self.queue.claims.renew(worker, {one.job.id: one.epoch})
            if one.job.id in renewal.cancel:
                await self.settle(worker, one, State.CANCELED)
        else:
            await self.settle(worker, one, self.random_numbers.choice([State.SUCCEEDED, State.SUCCEEDED, State.FAILED]))

    async def settle(self, worker: str, one: Claim, state: State) -> None:
        if await end(self.queue, one, worker=worker, state=state, device_seconds=self.random_numbers.random()):
            self.settled.append(one.job.id)

    async def keep_up(self) -> None:
        while not self.done:
            await self.queue.maintenance.reclaim(50)
            await self.queue.maintenance.expire(50)
            await asyncio.sleep(0.01)

    async def wake_too_late(self) -> None:
        while not self.done:
            if self.stale:
                worker, one = self.stale.pop(self.random_numbers.randrange(len(self.stale)))
                await self.settle(worker, one, State.SUCCEEDED)
            await asyncio.sleep(0.01)

    async def cancel_some(self, job_ids: list[str]) -> None:
        for job_id in self.random_numbers.sample(job_ids, len(job_ids) // 10):
            await self.queue.jobs.cancel(job_id)
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("seed", [1, 2])
async def test_every_job_ends_exactly_once(queue_with: Callable[..., Queue], make_submission: Make, seed: int) -> None:
    """Whatever its workers do: one terminal event per job, with its state, an empty queue, and groups that count it."""
    queue = queue_with(lease_ms=40, overdue_ms=50, max_attempts=5)
    random_numbers = random.Random(seed)
    submissions = [
        make_submission(
            window_ms=random_numbers.choice([0, 5, 20]),
            n=random_numbers.choice([1, 1, 1, 2, 4]),
            width=random_numbers.choice([64, 128, 192]),
            tenant=random_numbers.choice(["a", "b", "c"]),
            priority=random_numbers.choice(list(Priority)),
            time_limit_ms=50 if random_numbers.random() < 0.05 else None,
            group=random_numbers.choice([None, "g1", "g2"]),
        )
        for _ in range(JOBS)
    ]
    workers = ChaosWorkers(queue, random_numbers)
    ids, repaired = [], 0
    async with asyncio.timeout(110), asyncio.TaskGroup() as group:
        for number in range(WORKERS):
            group.create_task(workers.work(number))
        group.create_task(workers.keep_up())
        group.create_task(workers.wake_too_late())
        for first in range(0, JOBS, 20):
            ids += await put(queue, *submissions[first : first + 20])
            await asyncio.sleep(0.005)
        group.create_task(workers.cancel_some(ids))
        while await queue.workers.queue_depths():
            repaired += await queue.maintenance.reconcile()
            await asyncio.sleep(0.02)
        workers.done = True
    assert repaired == 0  # what is on its way is not astray
    terminal = Counter(
        (fields["job"], fields["state"])
        for _, fields in await queue.client.redis.xrange(queue.client.redis_keys.events)
        if State(fields["state"]).terminal
    )
    assert {job_id for job_id, _ in terminal} == set(ids)
    assert len(terminal) == JOBS
    assert set(terminal.values()) == {1}
    for job_id, state in terminal:
        assert await state_of(queue, job_id) == state
    of_group = {job.id: (job.tenant, job.group) for job in (one.job for one in submissions) if job.group}
    counted = Counter((*of_group[job_id], state) for job_id, state in terminal if job_id in of_group)
    for tenant, name in set(of_group.values()):
        jobs = (await queue.groups.get(tenant, str(name))).jobs
        assert {state: count for state, count in jobs.items() if count} == {
            state: counted[tenant, name, state] for state in State if counted[tenant, name, state]
        }
    assert max(Counter(workers.settled).values()) == 1
    assert await queue.maintenance.reconcile() == 0
    keys = queue.client.redis_keys
    assert (
        await queue.client.redis.exists(
            keys.leases, keys.claimed_jobs, keys.queued_jobs, keys.deadlines, keys.signatures
        )
        == 0
    )
