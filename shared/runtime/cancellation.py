"""Reliable cancellation of tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

RETRY_S = 0.2


async def cancel_and_wait(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks repeatedly until all have ended; their exceptions are dropped.

    Up to Python 3.11 `asyncio.wait_for`, which the Redis client uses for every command, swallows a cancellation in the
    loop iteration in which its awaitable ends.
    """
    all_tasks = tuple(tasks)
    pending: set[asyncio.Future[Any]] = {task for task in all_tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=RETRY_S)
    for task in all_tasks:
        if not task.cancelled():
            task.exception()  # otherwise asyncio logs that it was never retrieved
