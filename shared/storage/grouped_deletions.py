"""Deletions of many callers in few requests."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping

MOST_KEYS = 1000
"""Keys that S3 deletes in one request."""

MOST_REQUESTS = 4
"""At a time: with more, each would have few keys; with one, all would wait for a request that hangs."""

Delete = Callable[[list[str]], Awaitable[Mapping[str, Exception]]]
_Entry = tuple[list[str], "asyncio.Future[None]"]


class GroupedDeletions:
    """Deletes keys with `delete`, which returns the error of each key that is left; `is_fault_of_one` are errors of a
    request that another caller's keys can cause.

    A caller is served at once while few requests are in progress. Otherwise its keys go with those of others.
    """

    def __init__(self, delete: Delete, is_fault_of_one: Callable[[Exception], bool]) -> None:
        self._delete = delete
        self._is_fault_of_one = is_fault_of_one
        self._waiting: deque[_Entry] = deque()
        self._requests: set[asyncio.Task[None]] = set()

    async def delete(self, keys: list[str]) -> None:
        """Delete up to `MOST_KEYS` keys, or raise the first error of one of them."""
        deleted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((keys, deleted))
        self._requests = {request for request in self._requests if not request.done()}  # also those of a closed loop
        if len(self._requests) < MOST_REQUESTS:
            self._requests.add(asyncio.create_task(self._serve()))
        await deleted

    async def _serve(self) -> None:
        while group := self._next_group():
            await self._serve_group(group)

    def _next_group(self) -> list[_Entry]:
        group: list[_Entry] = []
        count = 0
        # A caller with more keys than that goes alone: it gets the server's error.
        while self._waiting and (not group or count + len(self._waiting[0][0]) <= MOST_KEYS):
            keys, deleted = self._waiting.popleft()
            if not deleted.done():  # its caller is gone
                group.append((keys, deleted))
                count += len(keys)
        return group

    async def _serve_group(self, group: list[_Entry]) -> None:
        try:
            errors = await self._delete([key for keys, _ in group for key in keys])
        except Exception as error:
            if len(group) > 1 and self._is_fault_of_one(error):
                for entry in group:
                    await self._serve_group([entry])
                return
            for _, deleted in group:
                _end(deleted, error)
            return
        for keys, deleted in group:
            _end(deleted, _first(errors, keys))


def _first(errors: Mapping[str, Exception], keys: Iterable[str]) -> Exception | None:
    return next((errors[key] for key in keys if key in errors), None)


def _end(deleted: asyncio.Future[None], error: Exception | None) -> None:
    if deleted.done():
        return
    if error is None:
        deleted.set_result(None)
    else:
        deleted.set_exception(error)
