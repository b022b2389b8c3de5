"""What keeps the queue right by itself: lost workers, deadlines, dead letters, retention, repair after a failover."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import Literal

from shared.job import JobRecord
from shared.protocols.openai import files
from shared.queue.client import Connected, translated
from shared.queue.records import record
from shared.queue.values import DeadLetter, Doomed, WorkerInfo

WORKER_TTL_S = 30
_SCAN_COUNT = 1000
_REPAIRED_AT_ONCE = 50


class Upkeep(Connected):
    async def reclaim(self, limit: int = 100) -> list[str]:
        """Take back up to `limit` jobs whose lease ran out, and return their ids.

        Each goes to the front of its line, to run alone. A loss while alone counts as the job's own; at `max_attempts`
        of these the job fails with code `worker_lost` and goes to the dead letters.
        """
        return [str(job_id) for job_id in await self.run("reclaim", limit)]

    async def expire(self, limit: int = 100) -> int:
        """End up to `limit` waiting jobs whose deadline has passed; returns how many."""
        return int(await self.run("expire", limit))

    async def webhooks_or_batches(self) -> tuple[bool, bool]:
        """Return whether there are webhooks to deliver, now or later, and whether batches are under way."""
        with translated():
            async with self.redis.pipeline(transaction=False) as pipe:
                pipe.exists(self.keys.outbox, self.keys.hook_hosts)
                pipe.exists(self.keys.backfills)
                hooks, batches = await pipe.execute()
        return bool(hooks), bool(batches)

    async def heartbeat(self, info: WorkerInfo, holds: Collection[str] = ()) -> None:
        """Tell that a worker lives; it is forgotten 30 s after its last beat.

        `holds` are the models whose jobs others leave to it: in its memory, or on their way there.
        """
        await self.run("heartbeat", info.id, json.dumps(asdict(info)), WORKER_TTL_S * 1000, *holds)

    async def learn(self, device: str, model: str, shape: str, rows: int, seconds: float) -> None:
        """Take one measured forward into the learned curve: a moving mean of seconds by rows, kept for 30 days."""
        await self.run("learn", device, model, shape, rows, repr(seconds))

    async def learn_start(self, seconds: float) -> None:
        """Take how long a worker took from its start until it was ready into a moving mean, kept for a week."""
        await self.run("learn_start", repr(seconds))

    async def start_seconds(self) -> float:
        """Return how long workers take to start, 0 where none has told of late."""
        with translated():
            return float(await self.redis.get(self.keys.start_s) or 0)

    async def dead_letters(self, after: str | None = None, limit: int = 100) -> tuple[list[DeadLetter], str | None]:
        """Return dead letters, newest first, and what to pass as `after` for more; None: no more."""
        with translated():
            rank = None if after is None else await self.redis.zrevrank(self.keys.dead, after)
            start = 0 if rank is None else rank + 1
            ids = await self.redis.zrange(self.keys.dead, start, start + limit, desc=True)
            more = len(ids) > limit
            ids = ids[:limit]
            letters = await self._read_letters(ids)
        return letters, ids[-1] if more else None

    async def dead_letter_count(self) -> int:
        """Return how many dead letters are kept."""
        with translated():
            return int(await self.redis.zcard(self.keys.dead))

    async def dead_letter(self, letter: str) -> DeadLetter | None:
        """Return one dead letter, None where there is none."""
        with translated():
            return next(iter(await self._read_letters([letter])), None)

    async def _read_letters(self, ids: Sequence[str]) -> list[DeadLetter]:
        if not ids:
            return []
        async with self.redis.pipeline(transaction=False) as pipe:
            for letter in ids:
                pipe.hgetall(self.keys.dead_letter(letter))
                pipe.hgetall(self.keys.job(letter))
            rows = await pipe.execute()
        return [
            _letter(letter, note, record(job))
            for letter, note, job in zip(ids, rows[0::2], rows[1::2], strict=True)
            if note
        ]

    async def redrive(self, job_id: str) -> bool:
        """Put a dead letter's job back in line, its attempts and losses forgotten; False where there is none."""
        return bool(await self.run("redrive", job_id))

    async def purge_dead(self, job_id: str) -> bool:
        """Delete a dead letter, and the record of its job; False where there is none."""
        return bool(await self.run("purge", job_id))

    async def due_retention(self, limit: int = 100) -> list[Doomed]:
        """Return what has outlived its retention. Remove it from storage, then hand it to `retained`."""
        rows = await self.run("due_retention", limit)
        return [_doomed(row) for row in rows]

    async def retained(self, doomed: Doomed) -> None:
        """Forget what storage does not hold any more: its row, record and indexes."""
        await self.run("retained", doomed.row)

    async def reconcile(self) -> int:
        """Bring jobs, lanes and counters into agreement again, as after a failover; returns how much was put right.

        Meant for a chore. It walks all keys of the namespace in small scripts, while others work on; where several do
        so at once, one does it and the others return 0.
        """
        token = secrets.token_hex(8)
        with translated():
            if not await self.redis.set(self.keys.reconciling, token, nx=True, ex=60):
                return 0
        try:
            repaired = await self._each("job", "reconcile_jobs")
            repaired += await self._each("lane", "reconcile_lanes")
            repaired += await self._each("sig", "reconcile_sigs")
            repaired += int(await self.run("reconcile_running"))
            return repaired + int(await self.run("reconcile_waiting"))
        finally:
            with translated():
                if await self.redis.get(self.keys.reconciling) == token:
                    await self.redis.delete(self.keys.reconciling)

    async def _each(self, kind: Literal["job", "lane", "sig"], script: str) -> int:
        prefix = f"{self.keys.prefix}{kind}:"
        pattern = "".join(f"\\{char}" if char in "*?[]\\" else char for char in prefix) + "*"
        repaired, cursor = 0, 0
        while True:
            with translated():
                cursor, names = await self.redis.scan(cursor, match=pattern, count=_SCAN_COUNT)
            ids = [name.removeprefix(prefix) for name in names]
            for first in range(0, len(ids), _REPAIRED_AT_ONCE):
                repaired += int(await self.run(script, *ids[first : first + _REPAIRED_AT_ONCE]))
                await asyncio.sleep(0)
            if int(cursor) == 0:
                return repaired


def _letter(letter: str, note: dict[str, str], job: JobRecord | None) -> DeadLetter:
    return DeadLetter(
        id=letter,
        at_ms=int(note.get("at", 0)),
        reason=note.get("reason", ""),
        detail=note.get("detail", ""),
        record=job,
    )


def _doomed(row: str) -> Doomed:
    kind, tenant, name, rest = row.split("|", 3)
    if kind == "input":
        return Doomed(kind="input", tenant=tenant, id=name, prefix=f"inputs/{tenant}/{name}/{rest}", row=row)
    if kind == "file":
        return Doomed(kind="file", tenant=tenant, id=name, prefix=files.prefix(tenant, name), row=row)
    return Doomed(kind="job", tenant=tenant, id=name, prefix=f"jobs/{name}/", row=row)
