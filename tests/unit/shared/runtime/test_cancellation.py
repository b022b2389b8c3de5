"""Cancellation of tasks that swallow one cancellation, and retries that end."""

from __future__ import annotations

import asyncio

import pytest

from shared.errors import RedisUnavailable, ScriptFailed
from shared.runtime.asyncio_tools import MAX_FAULTS, cancel_and_wait, retry_while_unavailable


async def swallow_once(swallowed: list[str]) -> None:
    """Ignore the first cancellation, like `asyncio.wait_for` on Python 3.11 can."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        swallowed.append("once")
    await asyncio.Event().wait()


async def failing() -> None:
    try:
        await asyncio.Event().wait()
    finally:
        raise RuntimeError("during cancellation")


async def test_all_tasks_end() -> None:
    swallowed: list[str] = []
    tasks = [asyncio.create_task(swallow_once(swallowed)), asyncio.create_task(failing()), asyncio.create_task(done())]
    await asyncio.sleep(0)
    async with asyncio.timeout(20):
        await cancel_and_wait(tasks)
    assert all(task.done() for task in tasks)
    assert swallowed == ["once"]


async def done() -> None: ...


async def test_no_tasks_return_at_once() -> None:
    await cancel_and_wait(())


async def test_a_fault_is_not_retried_without_end() -> None:
    """Outages between do not count: their length is unknown."""
    calls = 0

    async def call() -> None:
        nonlocal calls
        calls += 1
        raise ScriptFailed("fault") if calls % 2 else RedisUnavailable("outage")

    with pytest.raises(ScriptFailed):
        await retry_while_unavailable(call, "failed", first_s=0.001, max_s=0.001)
    assert calls == 2 * MAX_FAULTS - 1


async def test_a_retry_ends_without_a_result_when_it_is_not_wanted_any_more() -> None:
    calls = 0

    async def call() -> None:
        nonlocal calls
        calls += 1
        raise RedisUnavailable("outage")

    assert await retry_while_unavailable(call, "failed", until=lambda: calls == 3, first_s=0.001) is None
    assert calls == 3
