"""Retries during an outage of Redis or object storage, and reliable cancellation of tasks."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

import stamina
import stamina.instrumentation
import structlog

from shared.errors import Unavailable

log = structlog.get_logger()

T = TypeVar("T")
CANCEL_AGAIN_S = 0.2
MAX_FAULTS = 10

stamina.instrumentation.set_on_retry_hooks(())  # the events below name what is retried


async def retry_while_unavailable(
    action: Callable[[], Awaitable[T]],
    event: str,
    *,
    until: Callable[[], bool] = lambda: False,
    first_s: float = 0.1,
    max_s: float = 5.0,
    **context: object,
) -> T | None:
    """Repeat `action` while it raises `Unavailable`; return None once `until()` is true after a failure.

    Waits grow from `first_s` to `max_s`. Attempts are unlimited, as an outage has no known length, except for errors
    that are not retryable: the last of `MAX_FAULTS` is raised. Each failure is logged as `event` with `context`.
    """
    try:
        return await action()  # without stamina, which takes 0.1 ms for a call that needs no retry
    except Unavailable as error:
        failed: Unavailable | None = error
    faults = 0

    async def again() -> T:
        nonlocal failed
        if failed is None:
            return await action()
        first, failed = failed, None
        raise first

    def retriable(error: Exception) -> bool:
        nonlocal faults
        if not isinstance(error, Unavailable):
            return False
        log.warning(event, code=error.code, error=error.message, **context)
        faults += not error.retryable
        return faults < MAX_FAULTS and not until()

    retry = stamina.AsyncRetryingCaller(
        attempts=None, timeout=None, wait_initial=first_s, wait_max=max_s, wait_jitter=first_s
    )
    try:
        return await retry(retriable, again)
    except Unavailable as error:
        if not error.retryable and faults >= MAX_FAULTS:
            raise
    return None


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
        _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)
    for task in all_tasks:
        if not task.cancelled():
            task.exception()  # otherwise asyncio logs that it was never retrieved
