"""The rq queue of a namespace: enqueueing, the resources of a running chore, and the schedule of periodic chores.

rq's cron pickles its jobs, and rq's scheduler is a forked process that survives a killed parent. Therefore each chores
worker runs a thread; the id of a chore contains its period, so that only one worker can enqueue it.
"""

import asyncio
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import structlog
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry
from rq import Queue as RqQueue
from rq import Retry as RqRetry
from rq.exceptions import DuplicateJobError
from rq.scheduler import RQScheduler
from rq.serializers import JSONSerializer

from shared.config.settings import Settings
from shared.errors import RedisUnavailable
from shared.queue import Queue
from shared.queue.client import REFUSED_WHEN_FULL
from shared.queue.failover import Failover, NotPrimary, following

log = structlog.get_logger()

SWEEP = "worker.chores.maintenance.sweep"
MOVE_ON = "worker.chores.maintenance.move_on"
RECONCILE = "worker.chores.maintenance.reconcile"
DELIVER = "worker.chores.webhooks.deliver"
ADVANCE_DUE = "worker.chores.batches.advance_due"
ADVANCE = "worker.chores.batches.advance"
_PERIODIC = (
    ("sweep", SWEEP, 60),
    ("move-on", MOVE_ON, 10),
    ("reconcile", RECONCILE, 600),  # walks all keys; needed after a failover, which restarts no worker
    ("webhooks", DELIVER, 2),
    ("batches", ADVANCE_DUE, 2),
)

JOB_TIMEOUT_S = 60
"""rq interrupts a chore after this time, and restarts one of a killed worker a minute later still."""

BUDGET_S = 0.75 * JOB_TIMEOUT_S
"""A chore ends itself before rq interrupts it."""

_CONNECT_TIMEOUT_S = 5
_COMMAND_TIMEOUT_S = 10  # rq raises it for its own client to the length of its blocking read
_RESULT_TTL_S = 300  # keeps the id of a finished chore taken, so that no second worker runs it
_FAILURE_TTL_S = 86_400
_RETRY = RqRetry(max=2, interval=[5, 15])
_TICK_S = 1.0
_FULL_EVERY_S = 5.0
_LOCK_EVERY_S = 20  # rq's lock on a queue's schedule expires after a minute


def connect(settings: Settings) -> Redis:
    """Return a client only for rq, which needs bytes and changes the settings of the connection pool."""
    url = settings.rq_redis_url or settings.redis_url
    return Redis.from_url(
        url,
        **following(url, Failover(), threads=True),
        retry=Retry(NoBackoff(), 1, supported_errors=(NotPrimary,)),  # only what was refused is safe to repeat
        decode_responses=False,
        socket_connect_timeout=_CONNECT_TIMEOUT_S,
        socket_timeout=_COMMAND_TIMEOUT_S,
        health_check_interval=30,
        protocol=2,
    )


def queue_name(namespace: str) -> str:
    return f"fusequeue-{namespace}-chores"


def rq_queue(settings: Settings, connection: Redis) -> RqQueue:
    name = queue_name(settings.namespace)
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


@dataclass(frozen=True)
class ScheduledChore:
    """One run of a periodic chore; dropped if it does not start within `start_within_s`."""

    chore: str
    args: tuple[Any, ...]
    chore_id: str
    start_within_s: int


def due_chores(now_s: float, last_s: float | None, token: str) -> list[ScheduledChore]:
    """Return the chores that became due between `last_s` and `now_s`; all at a worker's start (`last_s` is None).

    The id of a period is the same in every worker. The ids of a start contain `token`, because a killed predecessor
    can hold the id of the current period.
    """
    due = []
    for name, chore, every_s in _PERIODIC:
        period = int(now_s // every_s)
        if last_s is not None and int(last_s // every_s) >= period:
            continue
        chore_id = f"{name}-{period}" if last_s is not None else f"{name}-start-{token}"
        if chore in (SWEEP, RECONCILE):  # chains of chunks
            due.append(ScheduledChore(chore, (chore_id, 0, now_s + every_s), f"{chore_id}-0", every_s))
        else:
            due.append(ScheduledChore(chore, (), chore_id, every_s))
    return due


def idle_chores(configured: Settings) -> set[str]:
    """Return the frequent chores without work; running one costs many times this check."""

    async def pending_work() -> tuple[bool, bool]:
        async with job_queue(configured) as queue:
            return await queue.maintenance.pending_work()

    try:
        webhooks, batches = asyncio.run(pending_work())
    except RedisUnavailable:
        return set()
    return {chore for chore, pending in ((DELIVER, webhooks), (ADVANCE_DUE, batches)) if not pending}


class Schedule:
    """Thread that ticks once a second until `stop`; survives Redis outages.

    A full Redis refuses what rq writes: until it has memory again, the thread calls `when_full` itself.
    """

    def __init__(self, settings: Settings, connection: Redis, when_full: Callable[[], object]) -> None:
        self._settings = settings
        self._when_full = when_full
        self._full_at_s = float("-inf")  # time.monotonic() of the last such call
        self._queue = rq_queue(settings, connection)
        self._retries = RQScheduler(
            [self._queue.name], connection, logging_level="WARNING", serializer=self._queue.serializer
        )
        self._token = secrets.token_hex(4)
        self._last_s: float | None = None
        self._locked_at_s = 0.0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chores-schedule", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and release the retry lock for other workers."""
        self._stopping.set()
        self._thread.join()
        try:
            self._retries.release_locks()
            self._retries.connection.close()
        except RedisError as error:
            log.warning("schedule_unlock_failed", error=str(error))

    def tick(self, now_s: float) -> None:
        """Enqueue the chores and retries that are due at `now_s`."""
        due = due_chores(now_s, self._last_s, self._token)
        idle = idle_chores(self._settings) if any(item.chore in (DELIVER, ADVANCE_DUE) for item in due) else ()
        for item in due:
            if item.chore not in idle:
                within_s = item.start_within_s
                enqueue(self._queue, item.chore, *item.args, chore_id=item.chore_id, start_within_s=within_s)
        self._last_s = now_s
        if now_s - self._locked_at_s >= _LOCK_EVERY_S:
            self._retries.acquire_locks()
            self._locked_at_s = now_s
        self._retries.enqueue_scheduled_jobs()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._tick_or_make_room()
            except (RedisError, RedisUnavailable) as error:
                log.warning("schedule_redis_unavailable", error=str(error))
            except Exception:
                log.exception("schedule_tick_failed")
            self._stopping.wait(_TICK_S)

    def _tick_or_make_room(self) -> None:
        try:
            self.tick(time.time())
        except RedisError as error:
            if REFUSED_WHEN_FULL not in str(error) or time.monotonic() - self._full_at_s < _FULL_EVERY_S:
                raise
            log.warning("redis_full", remedy="raise its maxmemory; expired objects are deleted meanwhile")
            self._full_at_s = time.monotonic()
            self._when_full()
