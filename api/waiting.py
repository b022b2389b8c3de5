"""Waiting for a job without asking again and again."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from api.context import Services
from shared.queue import JobEvent
from shared.runtime.cancellation import canceled

_WAIT = re.compile(r"wait(?:\s*=\s*\"?(\d{1,9})\"?)?")


async def follow(
    events: AsyncIterator[JobEvent], closing: asyncio.Event, silence_s: float
) -> AsyncGenerator[JobEvent | None]:
    """Yield each event, and None after every `silence_s` without one; ends when the events do or the API stops."""
    stop = asyncio.ensure_future(closing.wait())
    coming: asyncio.Future[JobEvent] | None = None
    try:
        while True:
            if coming is None:
                coming = asyncio.ensure_future(anext(events))
            either: set[asyncio.Future[Any]] = {coming, stop}
            done, _ = await asyncio.wait(either, timeout=silence_s, return_when=asyncio.FIRST_COMPLETED)
            if stop in done:
                return
            if coming not in done:
                yield None
                continue
            arrived, coming = coming, None
            try:
                event = arrived.result()
            except StopAsyncIteration:
                return
            yield event
    finally:
        stop.cancel()
        if coming is not None:
            await canceled((coming,))


async def until_terminal(job_id: str, seconds: float, services: Services) -> bool:
    """Wait until the job has ended, `seconds` at the most, and return whether it has."""
    with contextlib.suppress(TimeoutError), services.waiter_limit.counted():
        async with (
            asyncio.timeout(seconds),
            services.feed.subscribe(job_id, end_only=True) as events,
            contextlib.aclosing(follow(events, services.closing, seconds)) as followed,
        ):
            async for event in followed:
                if event is not None:
                    return True
    return False


def now_s() -> float:
    """Return the time on the clock by which waits are counted."""
    return asyncio.get_running_loop().time()


def preferred_wait_s(prefer: str | None, longest_s: float) -> float | None:
    """Return how long `Prefer` (RFC 7240) asks to wait, bounded; None where it does not.

    Preferences that are not known are ignored, as the RFC has it.
    """
    for preference in (prefer or "").lower().split(","):
        found = _WAIT.fullmatch(preference.split(";")[0].strip())
        if found:
            return min(float(found[1]), longest_s) if found[1] else longest_s
    return None
