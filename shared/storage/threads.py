"""Blocking calls of a storage in threads, within time limits."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")

MIN_BYTES_PER_S = 256 * 1024
"""A write may take its timeout and the time of its bytes at this rate."""


class NoResponse(Exception):
    """A call that took longer than `limit_s`; its thread can still run."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"within {limit_s:.3g} s")


class Closable(Protocol):
    def close(self) -> None: ...


class StorageThreads:
    """A pool of threads; a call waits `timeout_s` for one, and is limited from the start of its work."""

    def __init__(self, count: int, name: str, timeout_s: float) -> None:
        self._pool = ThreadPoolExecutor(count, name)
        self._closer = ThreadPoolExecutor(1, f"{name}-close")  # the others are for calls that are waited for
        self._timeout_s = timeout_s
        self._writes: dict[str, _Call[None]] = {}

    async def run(self, work: Callable[[], T]) -> T:
        """Return what `work` returns; raises `NoResponse` after `timeout_s`."""
        return await self._result(_Call(self._pool, work), self._timeout_s)

    async def write(self, key: str, content: tuple[bytes, str], work: Callable[[], None]) -> None:
        """Write `content` under `key`, never beside another write of the key; raises `NoResponse`.

        A write that took too long goes on in its thread: its repetition waits for it, and is done if it succeeds.
        """
        limit_s = self._timeout_s + len(content[0]) / MIN_BYTES_PER_S
        while (before := self._writes.get(key)) is not None:
            ended, _ = await asyncio.wait({before.ended}, timeout=limit_s)
            if not ended:
                raise NoResponse(limit_s)
            if before.content == content and before.succeeded:
                return
        await self._result(self._begin_write(key, content, work), limit_s)

    def close_soon(self, file: Closable) -> None:
        """Close a file without waiting: its close waits for a thread that hangs in a read of the file."""
        with suppress(RuntimeError):  # after `close`
            self._closer.submit(file.close)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._closer.shutdown(wait=False)

    def _begin_write(self, key: str, content: tuple[bytes, str], work: Callable[[], None]) -> "_Call[None]":
        call = self._writes[key] = _Call(self._pool, work, content)
        call.ended.add_done_callback(lambda _: self._writes.pop(key))
        return call

    async def _result(self, call: "_Call[T]", limit_s: float) -> T:
        left_s = self._timeout_s
        try:
            while left_s > 0:
                await asyncio.wait({call.ended}, timeout=left_s)
                if call.ended.done():
                    return call.ended.result()
                left_s = 0.0 if call.started_s is None else call.started_s + limit_s - time.monotonic()
            raise NoResponse(limit_s)
        finally:
            call.future.cancel()  # has no effect on a call that has a thread
            del call  # its error refers to this frame


class _Call(Generic[T]):
    """Work that waits for a thread of a pool, or has one since `started_s`."""

    def __init__(
        self, pool: ThreadPoolExecutor, work: Callable[[], T], content: tuple[bytes, str] | None = None
    ) -> None:
        started_s: list[float] = []  # `timed` uses no `self`: the error of the work would refer to this object

        def timed() -> T:
            started_s.append(time.monotonic())
            return work()

        self.content = content
        self.future: Future[T] = pool.submit(timed)
        self.ended = asyncio.wrap_future(self.future)
        self.ended.add_done_callback(_retrieve)
        self._started_s = started_s

    @property
    def started_s(self) -> float | None:
        return self._started_s[0] if self._started_s else None

    @property
    def succeeded(self) -> bool:
        return self.ended.done() and not self.ended.cancelled() and self.ended.exception() is None


def _retrieve(ended: "asyncio.Future[T]") -> None:
    """Retrieve the error of a call that no one waits for any more: asyncio would log it."""
    if not ended.cancelled():
        ended.exception()
