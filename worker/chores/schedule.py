"""Puts periodic chores, and retries whose time has come, into the line.

rq offers two clocks of its own, and neither fits: its cron pickles, and its scheduler is a forked process that
outlives a killed parent. So each chores worker runs this one beside its work; the ids of chores name the time they
are for, and whichever worker comes second finds the id taken.
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
from shared.queue import Queue
from worker.chores import rq_queue
from worker.chores.batches import LOOK
from worker.chores.maintenance import MOVE_ON, RECONCILE
from worker.chores.retention import SWEEP
from worker.chores.webhooks import DELIVER

log = structlog.get_logger()

TICK_S = 1.0
SWEEP_EVERY_S = 60
MOVE_ON_EVERY_S = 10
RECONCILE_EVERY_S = 600  # a failover needs no restart of ours; all keys are walked, so not more often
DELIVER_EVERY_S = 2
LOOK_EVERY_S = 2
_LOCK_EVERY_S = 20  # rq's lock on a queue's schedule lasts a minute

_PERIODS = (
    ("sweep", SWEEP_EVERY_S),
    ("move-on", MOVE_ON_EVERY_S),
    ("reconcile", RECONCILE_EVERY_S),
    ("webhooks", DELIVER_EVERY_S),
    ("batches", LOOK_EVERY_S),
)
_CHORES = {"move-on": MOVE_ON, "reconcile": RECONCILE, "webhooks": DELIVER, "batches": LOOK}


@dataclass(frozen=True)
class Turn:
    """One run of a periodic chore: its function, arguments and id, and the seconds in which it must begin."""

    chore: str
    args: tuple[Any, ...]
    chore_id: str
    start_within_s: int


def turns(now_s: float, last_s: float | None, token: str) -> list[Turn]:
    """Return the turns that came up after `last_s`, up to `now_s`; all where `last_s` is None, at a worker's start.

    A period's turn has the same id in every worker. Those of a start have `token` in it, since a predecessor that was
    killed may hold the period's own.
    """
    due = []
    for name, every_s in _PERIODS:
        period = int(now_s // every_s)
        if last_s is not None and int(last_s // every_s) >= period:
            continue
        chore_id = f"{name}-{period}" if last_s is not None else f"{name}-start-{token}"
        if name == "sweep":
            due.append(Turn(SWEEP, (chore_id, 0, now_s + every_s), f"{chore_id}-0", every_s))
        else:
            due.append(Turn(_CHORES[name], (), chore_id, every_s))
    return due


def idle_chores(configured: Settings) -> set[str]:
    """Return those of the frequent chores that would find nothing to do: a run of one costs many times this look."""
    try:
        hooks, batches = asyncio.run(_hooks_and_batches(configured))
    except RedisUnavailable:
        return set()
    return {chore for chore, wanted in ((DELIVER, hooks), (LOOK, batches)) if not wanted}


async def _hooks_and_batches(configured: Settings) -> tuple[bool, bool]:
    queue = Queue.connect(configured)
    try:
        return await queue.maintenance.pending_work()
    finally:
        await queue.close()


class Schedule:
    """A thread that ticks once a second until it is stopped; Redis may come and go meanwhile."""

    def __init__(self, settings: Settings, connection: Redis) -> None:
        self._settings = settings
        self._queue = rq_queue.line(settings, connection)
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
        """End the thread and let another worker have the retries at once."""
        self._stopping.set()
        self._thread.join()
        try:
            self._retries.release_locks()
            self._retries.connection.close()
        except RedisError as error:
            log.warning("schedule_lock_kept", error=str(error))

    def tick(self, now_s: float) -> None:
        """Enqueue what is due at `now_s`."""
        due = turns(now_s, self._last_s, self._token)
        idle = idle_chores(self._settings) if any(turn.chore in (DELIVER, LOOK) for turn in due) else ()
        for turn in due:
            if turn.chore in idle:
                continue
            rq_queue.put(
                self._queue, turn.chore, *turn.args, chore_id=turn.chore_id, start_within_s=turn.start_within_s
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
                log.warning("schedule_waits_for_redis", error=str(error))
            except Exception:
                log.exception("schedule_tick_failed")
            self._stopping.wait(TICK_S)
