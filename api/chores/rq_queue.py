"""The rq queues of a namespace, one per kind of chore: enqueueing, and the resources of a running chore."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import StrEnum
from functools import lru_cache
from typing import Any

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import ResponseError
from redis.retry import Retry
from rq import Queue as RqQueue
from rq import Retry as RqRetry
from rq.exceptions import DuplicateJobError
from rq.serializers import JSONSerializer

from shared.config.settings import Settings
from shared.errors import ConfigurationError, IncompatibleRedis
from shared.queue import Queue
from shared.queue.connections.failover import Failover, NotPrimary, following
from shared.queue.connections.redis_traits import CLUSTER_REMEDY, is_cluster


class ChoreQueue(StrEnum):
    """Kinds of chores that do not wait for each other: each has a queue, and a process that works on it."""

    WEBHOOKS = "webhooks"
    BATCHES = "batches"
    UPKEEP = "upkeep"


SWEEP = "api.chores.maintenance.sweep"
MOVE_ON = "api.chores.maintenance.move_on"
RECONCILE = "api.chores.maintenance.reconcile"
DELIVER = "api.chores.webhooks.deliver"

JOB_TIMEOUT_S = 60
"""rq interrupts a chore after this time, and restarts one of a killed worker a minute later still."""

BUDGET_S = 0.75 * JOB_TIMEOUT_S
"""A chore ends itself before rq interrupts it."""

_CONNECT_TIMEOUT_S = 5
_COMMAND_TIMEOUT_S = 10  # rq raises it for its own client to the length of its blocking read
_RESULT_TTL_S = 300  # keeps the id of a finished chore taken, so that no second worker runs it
_FAILURE_TTL_S = 86_400
_RETRY = RqRetry(max=2, interval=[5, 15])


def connect(settings: Settings) -> Redis:
    """Return a client only for rq, which needs bytes and changes the settings of the connection pool."""
    url = settings.rq_redis_url or settings.redis_url
    try:
        client = Redis.from_url(
            url,
            **following(url, Failover(), threads=True),
            retry=Retry(NoBackoff(), 1, supported_errors=(NotPrimary,)),  # only what was refused is safe to repeat
            decode_responses=False,
            socket_connect_timeout=_CONNECT_TIMEOUT_S,
            socket_timeout=_COMMAND_TIMEOUT_S,
            health_check_interval=30,
            protocol=2,
        )
        pool = client.connection_pool
        pool.connection_class(**pool.connection_kwargs)
    except (ValueError, TypeError) as error:  # of an option after the `?`
        name = "FUSEQUEUE_REDIS_URL" if settings.rq_redis_url is None else "FUSEQUEUE_RQ_REDIS_URL"
        raise ConfigurationError(f"{name}: {error}") from error
    return client


def check(settings: Settings) -> None:
    """Raise `IncompatibleRedis` for a cluster: rq uses keys of many slots in one command.

    By a client of its own: rq raises the timeout of connections that its client opens later only.
    """
    with connect(settings) as connection:
        try:
            info = connection.info("cluster")
        except ResponseError:  # some services do not allow INFO
            return
    if is_cluster(info):
        raise IncompatibleRedis(f"the Redis of the chores is a cluster; {CLUSTER_REMEDY}")


@lru_cache(maxsize=1)
def kept_connection(settings: Settings) -> Redis:
    """Return the client with which chores of this process enqueue others.

    rq keeps a script for every client that enqueues a unique chore: 35 KB for each that was opened for one chore.
    """
    return connect(settings)


def queue_name(namespace: str, kind: ChoreQueue) -> str:
    return f"fusequeue-{namespace}-chores-{kind.value}"


def rq_queue(settings: Settings, connection: Redis, kind: ChoreQueue) -> RqQueue:
    name = queue_name(settings.namespace, kind)
    return RqQueue(name, connection=connection, serializer=JSONSerializer, default_timeout=JOB_TIMEOUT_S)


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
