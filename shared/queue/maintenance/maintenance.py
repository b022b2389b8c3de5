"""Lost workers, deadlines, retention, and repair after a failover."""

import math
import time
from contextlib import suppress
from functools import partial

from shared.errors import RedisUnavailable
from shared.job import State
from shared.queue.connections.errors import translated
from shared.queue.maintenance.grace import AHEAD_MS, decide
from shared.queue.maintenance.reconcile import Reconciliation
from shared.queue.maintenance.retention import Retention
from shared.queue.scripts import DUE_AT_ONCE
from shared.queue.transactions import Transaction
from shared.runtime.clock import now_ms

CHORES = ("deliver", "advance", "sweep", "move-on", "reconcile")
"""The periodic chores."""

_REFRESHED = 100


class Maintenance(Retention):
    async def reclaim(self, limit: int = 100) -> list[str]:
        """Requeue up to `limit` jobs whose lease has expired, to run solo; return their ids.

        A loss while solo counts as the job's own; after `max_attempts` of them the job fails with code `worker_lost`
        and becomes a dead letter.
        """
        transaction = Transaction(self._client)
        numbers, lease_ms = await transaction.read(
            ("HMGET", self._keys.reclaims, "last", "gap", "gaps", "refreshed"),
            ("HGET", self._keys.policies, "lease_ms"),
        )
        last, gap, gaps, refreshed = (None if number is None else int(number) for number in numbers)
        now, lease = transaction.now_ms, int(lease_ms or self._settings.lease_ms)
        grace = decide(now=now, lease=lease, last=last, gap=gap, gaps=gaps or 0)
        reclaimed = await self._scripts.reclaim(limit, now, grace.before_ms, grace.gap_ms or 0, grace.gaps)
        was_set_back = last is not None and last > now + AHEAD_MS
        if was_set_back or refreshed is not None:
            await self._transact(partial(self._refresh, 0 if was_set_back else refreshed or 0), when_full=True)
        return reclaimed

    async def _refresh(self, first: int, transaction: Transaction) -> None:
        """Update the readiness of a page of signatures: the clock was set back since it was written."""
        last = first + _REFRESHED - 1
        (signatures,) = await transaction.read(("ZRANGE", self._keys.signatures, first, last), fenced=False)
        for signature in signatures:
            transaction.call("refresh_signature", signature)
        if len(signatures) == _REFRESHED:
            transaction.write("HSET", self._keys.reclaims, "refreshed", last + 1)
        else:
            transaction.write("HDEL", self._keys.reclaims, "refreshed")

    async def expire(self, limit: int = 100) -> int:
        """End all queued jobs that can no longer meet their deadline, or are paused for too long; return how many.

        Those past their latest start that still can become late. A script reads `limit` jobs before their latest start,
        and as many late ones.
        """
        ended = 0
        while due := await self._transact(partial(self._expire, limit), when_full=True):
            states = await self._replies(("HGET", self._keys.job(job_id), "state") for job_id in due)
            ended += states.count(State.EXPIRED)
        return ended

    async def _expire(self, limit: int, transaction: Transaction) -> list[str]:
        """End queued jobs that are due, or let them be late; return all jobs that were due."""
        indexes = (self._keys.deadlines, self._keys.late)
        first = (("ZRANGE", name, 0, limit - 1, "WITHSCORES") for name in indexes)
        found = await transaction.read(*first, fenced=False)
        due = [
            (name, job_id, at)
            for name, rows in zip(indexes, found, strict=True)
            for job_id, at in zip(rows[::2], rows[1::2], strict=True)
            if float(at) <= transaction.now_ms
        ]
        reads = (("HGET", self._keys.job(job_id), "sig") for _, job_id, _ in due)
        signatures = await transaction.read(*reads, fenced=False)
        for name, job_id, at in due:
            transaction.call("miss_start", name, job_id, at)
        for signature in filter(None, dict.fromkeys(signatures)):
            transaction.call("refresh_signature", signature)
        return [job_id for _, job_id, _ in due] + await self._end_pauses(limit, transaction)

    async def _end_pauses(self, limit: int, transaction: Transaction) -> list[str]:
        """End jobs whose pause has lasted as long as results are kept; return them."""
        now = transaction.now_ms
        found = ("ZRANGEBYSCORE", self._keys.paused, "-inf", now, "WITHSCORES", "LIMIT", 0, limit)
        (rows,) = await transaction.read(found, fenced=False)
        for job_id, at in zip(rows[::2], rows[1::2], strict=True):
            transaction.call("end_pause", job_id, at)
        return list(rows[::2])

    async def queue_due(self, budget_s: float = math.inf) -> int:
        """Queue the jobs for later that are due, for up to `budget_s`; return how many.

        Jobs that wait for others are told of their ends, and count too.

        A script handles `DUE_AT_ONCE` jobs. Workers call it with their heartbeats, the chores for when there are none.
        """
        queued, until_s = 0, time.monotonic() + budget_s
        while True:
            due = await self._scripts.queue_due(DUE_AT_ONCE)
            queued += due
            if due < DUE_AT_ONCE or time.monotonic() > until_s:
                return queued

    async def waiting_jobs(self) -> int:
        """Return how many jobs are for later."""
        with translated():
            return int(await self._redis.zcard(self._keys.later))

    async def pending_work(self) -> tuple[bool, bool]:
        """Return whether webhook deliveries are pending, and whether batches are active."""
        with translated():
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.exists(self._keys.outbox_tenants, self._keys.webhook_tenants)
                pipe.exists(self._keys.batch_tenants)
                webhooks, batches = await pipe.execute()
        return bool(webhooks), bool(batches)

    async def note_chore(self, chore: str) -> None:
        """Record that a chore ends now without an error; does nothing while Redis is full or unavailable."""
        with suppress(RedisUnavailable), translated():
            await self._redis.hset(self._keys.chores, chore, str(now_ms()))

    async def chore_ages_s(self) -> dict[str, float]:
        """Return the seconds since each of `CHORES` ended without an error: infinity if none did, 0 without work."""
        webhooks, batches = await self.pending_work()
        with translated():
            times = await self._redis.hmget(self._keys.chores, list(CHORES))
        now, idle = now_ms(), {"deliver": not webhooks, "advance": not batches}
        ages_s = {
            chore: math.inf if at is None else max(0, now - int(at)) / 1000
            for chore, at in zip(CHORES, times, strict=True)
        }
        return {chore: 0.0 if idle.get(chore) else age_s for chore, age_s in ages_s.items()}

    async def reconcile(self, budget_s: float = math.inf) -> int:
        """Repair disagreements between jobs, lanes and counters, as after a failover; return how many.

        It scans all keys of the namespace in small scripts, concurrently with other work, and continues where the last
        call used up its `budget_s`. Only one caller at a time does so, the others return 0.
        """
        run = Reconciliation(self._client, budget_s)
        await run.run()
        return run.repaired

    async def reconcile_unfinished(self) -> bool:
        """Return whether a `reconcile` used up its time before its end, and no process continues it now."""
        with translated():
            progress, lock = await self._redis.exists(self._keys.reconcile_progress), self._keys.reconciling
            return bool(progress) and not await self._redis.exists(lock)
