"""Cancellation of tasks that swallow one cancellation."""

from __future__ import annotations

import asyncio

from shared.runtime.asyncio_tools import cancel_and_wait


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
