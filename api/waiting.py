"""Waiting for job events. Each process has a bounded number of waiters."""

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any

from api.errors import TooManyStreams
from shared.queue import EventFeed, JobEvent
from shared.runtime import metrics
from shared.runtime.asyncio_tools import cancel_and_wait

# Each waiter holds a connection and a bounded queue; many more would exhaust the process's file descriptors.
MAX_WAITERS = 5_000
_WAIT = re.compile(r"wait(?:\s*=\s*\"?(\d{1,9})\"?)?")


class Waiters:
    """Clients of this process that wait for job events, by a stream or by a request that waits."""

    def __init__(self, feed: EventFeed, closing: asyncio.Event, keepalive_s: float) -> None:
        self._feed = feed
        self._closing = closing
        self._keepalive_s = keepalive_s
        self._count = 0

    async def until_terminal(self, job_id: str, seconds: float) -> bool:
        """Wait up to `seconds` for the job's end, and return whether it has ended."""
        with contextlib.suppress(TimeoutError), self.counted():
            async with (
                asyncio.timeout(seconds),
                self._feed.subscribe(job_id, end_only=True) as events,
                contextlib.aclosing(_until_closing(events, self._closing, seconds)) as received,
            ):
                async for event in received:
                    if event is not None:
                        return True
        return False

    async def events(self, job_id: str, after: str | None = None) -> AsyncGenerator[JobEvent | None]:
        """Yield the job's events after the id `after`, and None as a keepalive; ends when the API stops.

        Raises `TooManyStreams`.
        """
        with self.counted():
            async with (
                self._feed.subscribe(job_id, after) as events,
                contextlib.aclosing(_until_closing(events, self._closing, self._keepalive_s)) as received,
            ):
                async for event in received:
                    yield event

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count one waiter while the block runs, or raise `TooManyStreams`."""
        self.check()
        self._count += 1
        metrics.event_subscribers.inc()
        try:
            yield
        finally:
            self._count -= 1
            metrics.event_subscribers.dec()

    def check(self) -> None:
        """Raise `TooManyStreams` when the limit is reached."""
        if self._count >= MAX_WAITERS:
            raise TooManyStreams(f"{MAX_WAITERS} clients are waiting at this process; try again later")


async def _until_closing(
    events: AsyncIterator[JobEvent], closing: asyncio.Event, silence_s: float
) -> AsyncGenerator[JobEvent | None]:
    """Yield each event, and None after every `silence_s` without one; ends with the events or when the API stops."""
    stop = asyncio.ensure_future(closing.wait())
    pending: asyncio.Future[JobEvent] | None = None
    try:
        while True:
            if pending is None:
                pending = asyncio.ensure_future(anext(events))
            either: set[asyncio.Future[Any]] = {pending, stop}
            done, _ = await asyncio.wait(either, timeout=silence_s, return_when=asyncio.FIRST_COMPLETED)
            if stop in done:
                return
            if pending not in done:
                yield None
                continue
            arrived, pending = pending, None
            try:
                event = arrived.result()
            except StopAsyncIteration:
                return
            yield event
    finally:
        stop.cancel()
        if pending is not None:
            await cancel_and_wait((pending,))


def preferred_wait_s(prefer: str | None, max_wait_s: float) -> float | None:
    """Return the wait that the header `Prefer` (RFC 7240) requests, bounded; None where it requests none.

    Unknown preferences are ignored, as the RFC requires.
    """
    for preference in (prefer or "").lower().split(","):
        wait = _WAIT.fullmatch(preference.split(";")[0].strip())
        if wait:
            return min(float(wait[1]), max_wait_s) if wait[1] else max_wait_s
    return None
