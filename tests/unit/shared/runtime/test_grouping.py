"""Concurrent calls that run as one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from api.grouping import Grouped


class Doubles:
    """An operation that ends when it is allowed to; keeps its groups."""

    def __init__(self) -> None:
        self.groups: list[list[int]] = []
        self.allowed = asyncio.Event()

    async def run(self, items: list[int]) -> Sequence[int]:
        self.groups.append(items)
        await self.allowed.wait()
        if 13 in items:
            raise ValueError("13")
        return [2 * item for item in items]


@pytest.fixture
async def operation() -> Doubles:
    return Doubles()


async def begun(operation: Doubles, groups: int) -> None:
    async with asyncio.timeout(30):
        while len(operation.groups) < groups:
            await asyncio.sleep(0)


async def test_a_lone_call_runs_at_once(operation: Doubles) -> None:
    operation.allowed.set()
    grouped = Grouped(operation.run, most=8)
    assert [await grouped.call(1), await grouped.call(2)] == [2, 4]
    assert operation.groups == [[1], [2]]


async def test_calls_gather_while_a_group_runs(operation: Doubles) -> None:
    grouped = Grouped(operation.run, most=3)
    first = asyncio.create_task(grouped.call(0))
    await begun(operation, 1)
    others = [asyncio.create_task(grouped.call(number)) for number in range(1, 6)]
    await asyncio.sleep(0)
    operation.allowed.set()
    assert await asyncio.gather(first, *others) == [0, 2, 4, 6, 8, 10]
    assert operation.groups == [[0], [1, 2, 3], [4, 5]]


async def test_calls_of_the_next_turns_of_the_loop_join_a_group(operation: Doubles) -> None:
    operation.allowed.set()
    grouped = Grouped(operation.run, most=8)

    async def call_after(turns: int) -> int:
        for _ in range(turns):
            await asyncio.sleep(0)
        return await grouped.call(turns)

    await asyncio.gather(*map(call_after, range(3)))
    assert operation.groups == [[0, 1, 2]]


async def test_an_error_fails_only_its_group(operation: Doubles) -> None:
    grouped = Grouped(operation.run, most=2)
    calls = [asyncio.create_task(grouped.call(number)) for number in (1, 13, 2)]
    operation.allowed.set()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [str(result) for result in results] == ["13", "13", "4"]


async def test_a_group_ends_when_its_callers_are_canceled(operation: Doubles) -> None:
    ended: list[int] = []

    async def run(items: list[int]) -> Sequence[int]:
        results = await operation.run(items)
        ended.extend(results)
        return results

    grouped = Grouped(run, most=8)
    leaving = asyncio.create_task(grouped.call(1))
    await begun(operation, 1)
    leaving.cancel()
    await asyncio.wait({leaving})
    operation.allowed.set()
    assert await grouped.call(2) == 4
    assert ended == [2, 4]
