"""Waiting for job events. Each process has a bounded number of waiters, and each tenant a share of them."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass

from api.errors import TooManyStreams
from shared.queue import EventFeed, JobEvent
from shared.runtime import metrics
from shared.runtime.shares import may_take

_WAIT = re.compile(r"wait(?:\s*=\s*\"?(\d{1,9})\"?)?")


class Waiters:
    """Places of this process for clients that wait for job events, by a stream or by a request that waits."""

    def __init__(self, feed: EventFeed, closing: asyncio.Event, keepalive_s: float, places: int) -> None:
        self.feed = feed
        self.closing = closing
        self.keepalive_s = keepalive_s
        self._taken = 0
        self._held: Counter[str] = Counter()
        self._places = places

    async def end_when_closing(self) -> None:
        """End all subscriptions when the API begins to stop; runs once per process."""
        await self.closing.wait()
        self.feed.end_subscriptions()

    def of(self, tenant: str | None) -> TenantWaiters:
        """Return the waiters of a tenant; None where no keys are required: one tenant, who can use all places."""
        return TenantWaiters(self, tenant)

    @contextlib.contextmanager
    def counted(self, tenant: str | None) -> Iterator[None]:
        """Hold one place while the block runs, or raise `TooManyStreams`."""
        self.check(tenant)
        self._taken += 1
        if tenant is not None:
            self._held[tenant] += 1
        metrics.event_subscribers.inc()
        try:
            yield
        finally:
            self._taken -= 1
            if tenant is not None:
                self._held[tenant] -= 1
                if not self._held[tenant]:
                    del self._held[tenant]
            metrics.event_subscribers.dec()

    def held(self, tenant: str | None) -> int:
        """Return how many places a tenant has taken."""
        return self._taken if tenant is None else self._held[tenant]

    def check(self, tenant: str | None) -> None:
        """Raise `TooManyStreams` when all places are taken, or the tenant's share of them."""
        places = self._places
        if self._taken >= places:
            metrics.waiters_refused.labels("process").inc()
            raise TooManyStreams(f"{places} clients are waiting at this process; try again later")
        held = 0 if tenant is None else self._held[tenant]
        if not may_take(1, held=held, free=places - self._taken):
            metrics.waiters_refused.labels("tenant").inc()
            raise TooManyStreams(
                f"{held} streams and waiting requests of this tenant are open at this process, which has "
                f"{places - self._taken} of {places} places left; close some, or poll"
            )


@dataclass(frozen=True)
class TenantWaiters:
    """The streams and waiting requests of one tenant; each of them raises `TooManyStreams` without a place."""

    _waiters: Waiters
    _tenant: str | None

    async def until_terminal(self, job_id: str, seconds: float) -> bool:
        """Wait up to `seconds` for the job's end, and return whether it has ended."""
        waiters = self._waiters
        with contextlib.suppress(TimeoutError), self.counted():
            async with asyncio.timeout(seconds), waiters.feed.subscribe(job_id, end_only=True) as events:
                if not waiters.closing.is_set():
                    async for _ in events:
                        return True
        return False

    async def events(self, job_id: str, after: str | None = None) -> AsyncGenerator[JobEvent | None]:
        """Yield the job's events after the id `after`, and None as a keepalive; ends when the API stops."""
        waiters = self._waiters
        with self.counted():
            async with waiters.feed.subscribe(job_id, after) as events:
                while not waiters.closing.is_set():
                    # No task for each wait: two per stream were a fifth of its memory.
                    try:
                        async with asyncio.timeout(waiters.keepalive_s):
                            event = await anext(events)
                    except TimeoutError:
                        yield None
                    except StopAsyncIteration:
                        return
                    else:
                        yield event

    def counted(self) -> contextlib.AbstractContextManager[None]:
        """Hold one place while the block runs."""
        return self._waiters.counted(self._tenant)

    @property
    def held(self) -> int:
        """How many places the tenant has taken."""
        return self._waiters.held(self._tenant)

    def check(self) -> None:
        """Raise `TooManyStreams` unless a place can be taken."""
        self._waiters.check(self._tenant)


def preferred_wait_s(prefer: str | None, max_wait_s: float) -> float | None:
    """Return the wait that the header `Prefer` (RFC 7240) requests, bounded; None where it requests none.

    Unknown preferences are ignored, as the RFC requires.
    """
    for preference in (prefer or "").lower().split(","):
        wait = _WAIT.fullmatch(preference.split(";")[0].strip())
        if wait:
            return min(float(wait[1]), max_wait_s) if wait[1] else max_wait_s
    return None
