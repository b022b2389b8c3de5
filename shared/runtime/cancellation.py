"""Canceling that cannot be lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

AGAIN_S = 0.2


async def canceled(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks until all of them have ended; what they raise is dropped.

    Once may not be enough: up to Python 3.11 `asyncio.wait_for` swallows a cancellation that comes in the same turn as
    the end of what it waits for, and the Redis client sends every command by it.
    """
    every = tuple(tasks)
    waiting: set[asyncio.Future[Any]] = {task for task in every if not task.done()}
    while waiting:
        for task in waiting:
            task.cancel()
        _, waiting = await asyncio.wait(waiting, timeout=AGAIN_S)
    for task in every:
        if not task.cancelled():
            task.exception()  # else asyncio tells that nobody asked for it
