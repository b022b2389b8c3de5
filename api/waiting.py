"""Waiting for job events. Each process has a bounded number of waiters."""

import asyncio
import contextlib
import re
import resource
from collections.abc import AsyncGenerator, Iterator

from api.errors import TooManyStreams
from shared.queue import EventFeed, JobEvent
from shared.runtime import metrics

# Each waiter holds a connection: a file of the process, and about 25 KB.
MAX_WAITERS = 10_000
OTHER_FILES = 400  # of connections that do not wait, to Redis and storage, and of uploads
_WAIT = re.compile(r"wait(?:\s*=\s*\"?(\d{1,9})\"?)?")


class Waiters:
    """Clients of this process that wait for job events, by a stream or by a request that waits."""

    def __init__(self, feed: EventFeed, closing: asyncio.Event, keepalive_s: float) -> None:
        self._feed = feed
        self._closing = closing
        self._keepalive_s = keepalive_s
        self._count = 0
        self._files = max(0, open_files() - OTHER_FILES)

    async def end_when_closing(self) -> None:
        """End all subscriptions when the API begins to stop; runs once per process."""
        await self._closing.wait()
        self._feed.end_subscriptions()

    async def until_terminal(self, job_id: str, seconds: float) -> bool:
        """Wait up to `seconds` for the job's end, and return whether it has ended."""
        with contextlib.suppress(TimeoutError), self.counted():
            async with asyncio.timeout(seconds), self._feed.subscribe(job_id, end_only=True) as events:
                if not self._closing.is_set():
                    async for _ in events:
                        return True
        return False

    async def events(self, job_id: str, after: str | None = None) -> AsyncGenerator[JobEvent | None]:
        """Yield the job's events after the id `after`, and None as a keepalive; ends when the API stops.

        Raises `TooManyStreams`.
        """
        with self.counted():
            async with self._feed.subscribe(job_id, after) as events:
                while not self._closing.is_set():
                    # No task for each wait: two per stream were a fifth of its memory.
                    try:
                        async with asyncio.timeout(self._keepalive_s):
                            event = await anext(events)
                    except TimeoutError:
                        yield None
                    except StopAsyncIteration:
                        return
                    else:
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
        most = min(MAX_WAITERS, self._files)
        if self._count >= most:
            raise TooManyStreams(f"{most} clients are waiting at this process; try again later")


def open_files() -> int:
    """Return how many files this process can open, after raising its soft limit to what the hard one allows."""
    wanted = MAX_WAITERS + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return most
    return wanted if soft == resource.RLIM_INFINITY else soft


def preferred_wait_s(prefer: str | None, max_wait_s: float) -> float | None:
    """Return the wait that the header `Prefer` (RFC 7240) requests, bounded; None where it requests none.

    Unknown preferences are ignored, as the RFC requires.
    """
    for preference in (prefer or "").lower().split(","):
        wait = _WAIT.fullmatch(preference.split(";")[0].strip())
        if wait:
            return min(float(wait[1]), max_wait_s) if wait[1] else max_wait_s
    return None
