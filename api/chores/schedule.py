"""The schedule of periodic chores: a thread of each process, for the chores of its queue.

rq's cron pickles its jobs, and rq's scheduler is a forked process that survives a killed parent. The id of a chore
contains its period, so that only one of several processes can enqueue it.
"""

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import structlog
from redis import Redis
from redis.exceptions import RedisError
from rq.scheduler import RQScheduler

from api.chores import rq_queue
from api.chores.rq_queue import DELIVER, MOVE_ON, RECONCILE, SWEEP, ChoreQueue
from api.protocols.chore_part import PeriodicChore
from api.protocols.chore_parts import CHORE_PARTS
from shared.config.settings import Settings
from shared.errors import RedisUnavailable
from shared.queue.connections.errors import REFUSED_WHEN_FULL

log = structlog.get_logger()

PERIODIC: Mapping[ChoreQueue, tuple[PeriodicChore, ...]] = {
    ChoreQueue.UPKEEP: (
        PeriodicChore("sweep", SWEEP, 60),
        PeriodicChore("move-on", MOVE_ON, 10),
        PeriodicChore("reconcile", RECONCILE, 600),  # walks all keys; needed after a failover, which restarts no worker
    ),
    ChoreQueue.WEBHOOKS: (PeriodicChore("deliver", DELIVER, 2),),
    ChoreQueue.BATCHES: tuple(chore for part in CHORE_PARTS for chore in part.batch_chores),
}
_TICK_S = 1.0
_FULL_EVERY_S = 5.0
_LOCK_EVERY_S = 20  # rq's lock on a queue's schedule expires after a minute


@dataclass(frozen=True)
class ScheduledChore:
    """One run of a periodic chore; dropped if it does not start within `start_within_s`."""

    chore: str
    args: tuple[Any, ...]
    chore_id: str
    start_within_s: int


def due_chores(kind: ChoreQueue, now_s: float, last_s: float | None, token: str) -> list[ScheduledChore]:
    """Return the chores that became due between `last_s` and `now_s`; all at a process' start (`last_s` is None).

    The id of a period is the same in every process. The ids of a start contain `token`, because a killed predecessor
    can hold the id of the current period.
    """
    due = []
    for name, chore, every_s in PERIODIC[kind]:
        period = int(now_s // every_s)
        if last_s is not None and int(last_s // every_s) >= period:
            continue
        chore_id = f"{name}-{period}" if last_s is not None else f"{name}-start-{token}"
        if chore in (SWEEP, RECONCILE):  # chains of chunks
            due.append(ScheduledChore(chore, (chore_id, 0, now_s + every_s), f"{chore_id}-0", every_s))
        else:
            due.append(ScheduledChore(chore, (), chore_id, every_s))
    return due


def has_work(configured: Settings, kind: ChoreQueue) -> bool:
    """Return whether webhooks or batches are pending: running their chore costs many times this check."""
    if kind is ChoreQueue.UPKEEP:
        return True

    async def pending_work() -> tuple[bool, bool]:
        async with rq_queue.job_queue(configured) as queue:
            return await queue.maintenance.pending_work()

    try:
        webhooks, batches = asyncio.run(pending_work())
    except RedisUnavailable:
        return True
    return webhooks if kind is ChoreQueue.WEBHOOKS else batches


class Schedule:
    """Thread that ticks once a second until `stop`; survives Redis outages.

    A full Redis refuses what rq writes: until it has memory again, the thread calls `when_full` itself.
    """

    def __init__(
        self, settings: Settings, connection: Redis, kind: ChoreQueue, when_full: Callable[[], object] | None = None
    ) -> None:
        self._settings = settings
        self._kind = kind
        self._when_full = when_full
        self._full_at_s = float("-inf")  # time.monotonic() of the last such call
        self._queue = rq_queue.rq_queue(settings, connection, kind)
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
        due = due_chores(self._kind, now_s, self._last_s, self._token)
        for item in due if due and has_work(self._settings, self._kind) else ():
            within_s = item.start_within_s
            rq_queue.enqueue(self._queue, item.chore, *item.args, chore_id=item.chore_id, start_within_s=within_s)
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
            full = REFUSED_WHEN_FULL in str(error) and time.monotonic() - self._full_at_s >= _FULL_EVERY_S
            if not full or self._when_full is None:
                raise
            log.warning("redis_full", remedy="raise its maxmemory; expired objects are deleted meanwhile")
            self._full_at_s = time.monotonic()
            self._when_full()
