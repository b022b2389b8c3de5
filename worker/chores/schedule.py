"""Enqueues periodic chores and due retries.

rq's cron pickles its jobs, and rq's scheduler is a forked process that survives a killed parent. Therefore each chores
worker runs this thread; the id of a chore contains its period, so that only one worker can enqueue it.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from dataclasses import dataclass
from typing import Any

import structlog
from redis import Redis
from redis.exceptions import RedisError
from rq.scheduler import RQScheduler

from shared.config.settings import Settings
from shared.errors import RedisUnavailable
from worker.chores import rq_queue
from worker.chores.batches import ADVANCE_DUE
from worker.chores.maintenance import MOVE_ON, RECONCILE, SWEEP
from worker.chores.webhooks import DELIVER

log = structlog.get_logger()

TICK_S = 1.0
_LOCK_EVERY_S = 20  # rq's lock on a queue's schedule expires after a minute

_PERIODIC = (
    ("sweep", SWEEP, 60),
    ("move-on", MOVE_ON, 10),
    ("reconcile", RECONCILE, 600),  # walks all keys; needed after a failover, which restarts no worker
    ("webhooks", DELIVER, 2),
    ("batches", ADVANCE_DUE, 2),
)


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
        if chore == SWEEP:
            due.append(ScheduledChore(chore, (chore_id, 0, now_s + every_s), f"{chore_id}-0", every_s))
        else:
            due.append(ScheduledChore(chore, (), chore_id, every_s))
    return due


def idle_chores(configured: Settings) -> set[str]:
    """Return the frequent chores without work; running one costs many times this check."""
    try:
        webhooks, batches = asyncio.run(_pending_work(configured))
    except RedisUnavailable:
        return set()
    return {chore for chore, pending in ((DELIVER, webhooks), (ADVANCE_DUE, batches)) if not pending}


async def _pending_work(configured: Settings) -> tuple[bool, bool]:
    async with rq_queue.job_queue(configured) as queue:
        return await queue.maintenance.pending_work()


class Schedule:
    """Thread that ticks once a second until `stop`; survives Redis outages."""

    def __init__(self, settings: Settings, connection: Redis) -> None:
        self._settings = settings
        self._queue = rq_queue.rq_queue(settings, connection)
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
                rq_queue.enqueue(
                    self._queue, item.chore, *item.args, chore_id=item.chore_id, start_within_s=item.start_within_s
                )
        self._last_s = now_s
        if now_s - self._locked_at_s >= _LOCK_EVERY_S:
            self._retries.acquire_locks()
            self._locked_at_s = now_s
        self._retries.enqueue_scheduled_jobs()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self.tick(time.time())
            except RedisError as error:
                log.warning("schedule_redis_unavailable", error=str(error))
            except Exception:
                log.exception("schedule_tick_failed")
            self._stopping.wait(TICK_S)
