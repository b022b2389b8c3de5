"""The rq queue of a namespace: connecting, enqueueing, and the resources of a running chore."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from redis import Redis
from rq import Queue as RqQueue
from rq import Retry
from rq.exceptions import DuplicateJobError
from rq.serializers import JSONSerializer

from shared.config.settings import Settings
from shared.queue import Queue

JOB_TIMEOUT_S = 60
"""rq interrupts a chore after this time, and restarts one of a killed worker a minute later still."""

BUDGET_S = 0.75 * JOB_TIMEOUT_S
"""A chore ends itself before rq interrupts it."""

_CONNECT_TIMEOUT_S = 5
_COMMAND_TIMEOUT_S = 10  # rq raises it for its own client to the length of its blocking read
_RESULT_TTL_S = 300  # keeps the id of a finished chore taken, so that no second worker runs it
_FAILURE_TTL_S = 86_400
_RETRY = Retry(max=2, interval=[5, 15])


def connect(settings: Settings) -> Redis:
    """Return a client only for rq, which needs bytes and changes the settings of the connection pool."""
    return Redis.from_url(
        settings.rq_redis_url or settings.redis_url,
        decode_responses=False,
        socket_connect_timeout=_CONNECT_TIMEOUT_S,
        socket_timeout=_COMMAND_TIMEOUT_S,
        health_check_interval=30,
        protocol=2,
    )


def queue_name(namespace: str) -> str:
    return f"fusequeue-{namespace}-chores"


def rq_queue(settings: Settings, connection: Redis) -> RqQueue:
    return RqQueue(
        queue_name(settings.namespace),
        connection=connection,
        serializer=JSONSerializer,
        default_timeout=JOB_TIMEOUT_S,
    )


def enqueue(queue: RqQueue, chore: str, *args: Any, chore_id: str, start_within_s: int) -> bool:
    """Enqueue the function with the dotted path `chore`; False when `chore_id` exists.

    `chore_id` has letters, digits, `_` and `-`. A chore that does not start within `start_within_s` is dropped.
    """
    try:
        queue.enqueue(
            chore,
            args=args,
            job_id=f"{queue.name}-{chore_id}",
            unique=True,
            job_timeout=JOB_TIMEOUT_S,
            ttl=start_within_s,
            result_ttl=_RESULT_TTL_S,
            failure_ttl=_FAILURE_TTL_S,
            retry=_RETRY,
        )
    except DuplicateJobError:
        return False
    return True


@asynccontextmanager
async def job_queue(settings: Settings, budget_s: float = BUDGET_S) -> AsyncIterator[Queue]:
    """Open the job queue for one chore; raises `TimeoutError` after `budget_s`."""
    queue = Queue.connect(settings)
    try:
        async with asyncio.timeout(budget_s):
            yield queue
    finally:
        await queue.close()
