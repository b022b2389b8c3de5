"""The one rq queue of a namespace, and the terms on which chores get into it."""

from __future__ import annotations

from typing import Any

from redis import Redis
from rq import Queue, Retry
from rq.exceptions import DuplicateJobError
from rq.serializers import JSONSerializer

from shared.config.settings import Settings

JOB_TIMEOUT_S = 60
"""rq ends a chore that runs longer; one whose worker was killed is run again this and a minute later."""

_CONNECT_TIMEOUT_S = 5
_COMMAND_TIMEOUT_S = 10  # rq's worker raises it for its own client, to what its blocking read takes
_RESULT_TTL_S = 300  # a finished chore's id stays taken for this long, so that no second worker does it again
_FAILURE_TTL_S = 86_400
_RETRY = Retry(max=2, interval=[5, 15])


def connect(settings: Settings) -> Redis:
    """Return a client for rq alone: it wants bytes, and changes the pool's settings to its liking."""
    return Redis.from_url(
        settings.rq_redis_url or settings.redis_url,
        decode_responses=False,
        socket_connect_timeout=_CONNECT_TIMEOUT_S,
        socket_timeout=_COMMAND_TIMEOUT_S,
        health_check_interval=30,
        protocol=2,
    )


def name(namespace: str) -> str:
    """Return the name of the namespace's rq queue; rq's own keys begin with `rq:` and are shared by all of a Redis."""
    return f"fusequeue-{namespace}-chores"


def line(settings: Settings, connection: Redis) -> Queue:
    """Return the rq queue of the settings' namespace."""
    return Queue(
        name(settings.namespace),
        connection=connection,
        serializer=JSONSerializer,
        default_timeout=JOB_TIMEOUT_S,
    )


def put(queue: Queue, chore: str, *args: Any, chore_id: str, start_within_s: int) -> bool:
    """Enqueue the function at the dotted path `chore`, once for each `chore_id`; False where that is known already.

    `chore_id` is of letters, digits, `_` and `-`. A chore that is not begun within `start_within_s` is dropped.
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
