"""Bounded resources that tenants share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from shared.errors import Overloaded
from shared.runtime import metrics
from shared.runtime.shares import SharedPool, SharedTurns, may_take


@pytest.mark.parametrize(
    ("amount", "held", "free", "allowed"),
    [
        (10, 0, 10, True),  # the first may be all that is free
        (11, 0, 10, False),
        (1, 49, 51, True),  # a single tenant has half
        (1, 50, 50, False),
        (1, 25, 25, False),  # next to others, as much as it leaves free
        (1, 10, 30, True),
        (40, 10, 60, False),
    ],
)
def test_a_tenant_may_hold_as_much_as_it_leaves_free(amount: int, held: int, free: int, allowed: bool) -> None:
    assert may_take(amount, held=held, free=free) is allowed


def test_a_tenant_that_takes_all_it_can_leaves_room_for_others() -> None:
    """Half after one tenant, a third after two, a quarter after three."""
    pool, held = SharedPool("test", 1200), {}
    for greedy in ("a", "b", "c"):
        held[greedy] = 0
        while pool.take(greedy, 1):
            held[greedy] += 1
    assert held == {"a": 600, "b": 300, "c": 150}
    assert pool.take("modest", 75)
    pool.release("a", 600)
    assert pool.free == 675


class TurnsHarness:
    """Turns that tests hold open."""

    def __init__(self, size: int = 100, max_waiting: int = 8, timeout_s: float = 30.0) -> None:
        self.turns = SharedTurns(SharedPool("test", size), max_waiting=max_waiting, timeout_s=timeout_s)
        self.order: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def holding(self, tenant: str, amount: int) -> AsyncIterator[None]:
        async with asyncio.timeout(10), self.turns.turn(tenant, amount):
            yield

    async def begin(self, tenant: str, amount: int) -> None:
        """Start work in the background and return when it waits."""

        async def work() -> None:
            async with self.turns.turn(tenant, amount):
                self.order.append(tenant)

        self.tasks.append(asyncio.create_task(work()))
        await asyncio.sleep(0)


async def test_waiting_tenants_take_turns() -> None:
    """One that comes with a single piece of work does not wait for all of another's."""
    harness = TurnsHarness()
    async with harness.holding("first", 100):
        for tenant in ("greedy", "greedy", "greedy", "modest"):
            await harness.begin(tenant, 60)
        assert harness.order == []
    await asyncio.gather(*harness.tasks)
    assert harness.order == ["greedy", "modest", "greedy", "greedy"]


async def test_a_tenant_that_fills_its_share_does_not_hold_up_another() -> None:
    harness = TurnsHarness()
    async with AsyncExitStack() as stack:
        for _ in range(5):
            await stack.enter_async_context(harness.holding("greedy", 10))
        await harness.begin("greedy", 10)
        assert harness.order == []
        async with harness.holding("modest", 50):
            pass
        assert harness.order == []
    await asyncio.gather(*harness.tasks)
    assert harness.order == ["greedy"]


async def test_large_work_is_not_overtaken_for_ever() -> None:
    harness = TurnsHarness()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(harness.holding("a", 40))
        await harness.begin("large", 90)
        await harness.begin("small", 5)
        assert harness.order == []
    await asyncio.gather(*harness.tasks)
    assert harness.order == ["large", "small"]


async def test_work_larger_than_the_pool_runs_by_itself() -> None:
    harness = TurnsHarness()
    async with harness.holding("a", 1000):
        await harness.begin("b", 1)
        assert harness.order == []
    await asyncio.gather(*harness.tasks)


async def test_too_much_waiting_work_is_refused_and_counted() -> None:
    harness = TurnsHarness(max_waiting=2, timeout_s=0.05)
    refusals = metrics.share_refusals.labels("test")._value.get
    before = refusals()
    async with harness.holding("greedy", 100):
        await harness.begin("greedy", 1)
        await harness.begin("greedy", 1)
        with pytest.raises(Overloaded, match="2 requests of this tenant wait"):
            async with harness.holding("greedy", 1):
                pass
        with pytest.raises(Overloaded, match=r"no room for test in 0\.05 s"):
            async with harness.holding("other", 1):
                pass
        await asyncio.wait(harness.tasks, timeout=10)
    assert [type(task.exception()) for task in harness.tasks] == [Overloaded, Overloaded]
    assert refusals() - before == 4
    assert metrics.shared_in_use.labels("test")._value.get() == 0


async def test_canceled_work_leaves_the_line_and_the_pool() -> None:
    harness = TurnsHarness()
    async with harness.holding("a", 100):
        await harness.begin("b", 50)
        await harness.begin("c", 50)
        harness.tasks[0].cancel()
        await asyncio.wait(harness.tasks[:1])
    await harness.tasks[1]
    assert harness.order == ["c"]
    async with harness.holding("b", 100):
        pass
