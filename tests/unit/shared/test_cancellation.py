"""Tasks end when they are canceled, though one may lose a cancellation."""

from __future__ import annotations

import asyncio

from shared.runtime.cancellation import cancel_and_wait


async def deaf_once(swallowed: list[str]) -> None:
    """Go on after the first cancellation, as what sends to Redis may on Python 3.11."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        swallowed.append("once")
    await asyncio.Event().wait()


async def failing() -> None:
    try:
        await asyncio.Event().wait()
    finally:
        raise RuntimeError("on its way out")


async def test_all_have_ended_afterwards() -> None:
    swallowed: list[str] = []
    tasks = [asyncio.create_task(deaf_once(swallowed)), asyncio.create_task(failing()), asyncio.create_task(done())]
    await asyncio.sleep(0)
    async with asyncio.timeout(20):
        await cancel_and_wait(tasks)
    assert all(task.done() for task in tasks)
    assert swallowed == ["once"]


async def done() -> None: ...


async def test_nothing_to_cancel_is_no_wait() -> None:
    await cancel_and_wait(())
