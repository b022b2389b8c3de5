"""Calls made at the same time that run together, as one command to Redis."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


GATHER_TURNS = 3


class Grouped(Generic[Item, Result]):
    """Runs `run` on the items of concurrent calls: while a group runs, the next items gather, at most `most`.

    A lone call does not wait for others. `run` returns the results in order; its error is that of all calls of the
    group. A group ends even if its callers are canceled.
    """

    def __init__(self, run: Callable[[list[Item]], Awaitable[Sequence[Result]]], most: int) -> None:
        self._run = run
        self._most = most
        self._waiting: deque[tuple[Item, asyncio.Future[Result]]] = deque()
        self._task: asyncio.Task[None] | None = None

    async def call(self, item: Item) -> Result:
        """Return the result of an item."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._task is None:
            self._task = asyncio.create_task(self._run_groups())
        return await future

    async def _run_groups(self) -> None:
        try:
            while self._waiting:
                await self._gather()
                await self._run_group([self._waiting.popleft() for _ in range(min(self._most, len(self._waiting)))])
        finally:
            self._task = None
            for _, future in self._waiting:  # the process is stopping
                future.cancel()
            self._waiting.clear()

    async def _gather(self) -> None:
        """Let items join until a turn of the event loop brings none, for a few turns."""
        for _ in range(GATHER_TURNS):
            known = len(self._waiting)
            await asyncio.sleep(0)
            if len(self._waiting) == known:
                return

    async def _run_group(self, group: Sequence[tuple[Item, asyncio.Future[Result]]]) -> None:
        waiting = [future for _, future in group]
        try:
            results = await self._run([item for item, _ in group])
        except Exception as error:
            for future in waiting:
                if not future.done():
                    future.set_exception(error)
        except BaseException:
            for future in waiting:
                future.cancel()
            raise
        else:
            for future, result in zip(waiting, results, strict=True):
                if not future.done():
                    future.set_result(result)
