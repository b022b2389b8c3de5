"""Reconciling: repairing disagreements between jobs, lanes and counters, as after a failover.

Jobs and lanes are scanned in pages; phase and cursor are kept in Redis, where the next run continues. Counters
are counted again in pages, concurrently with other work: only the part of a difference that changes in the meantime
cannot explain is repaired.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Literal, TypeAlias

from redis.exceptions import ResponseError

from shared.queue.client import QueueClient, QueueComponent
from shared.queue.connections.errors import translated
from shared.queue.maintenance.footprint_count import FootprintCounter
from shared.queue.maintenance.recount import LOCK_S, Recount
from shared.queue.maintenance.repairs import Repairs

PHASES = ("jobs", "lanes", "paused", "queued", "running", "footprint")
FOOTPRINT_S = 20.0
"""Least time of a recount of what tenants keep, which another run cannot continue: a million records take as long."""

_Kind: TypeAlias = Literal["job", "lane", "paused_jobs", "signature", "file_parts"]
_SCANNED: dict[str, _Kind] = {"jobs": "job", "lanes": "lane", "paused": "paused_jobs"}
PROGRESS_S = 3600
_SCAN_COUNT = 1000
_CHUNK = 50
_LEASES = 500


class OutOfTime(Exception):
    """The time of a run has ended, or another process has taken its lock."""


class Reconciliation(QueueComponent):
    """One run, up to a number of seconds."""

    def __init__(self, client: QueueClient, budget_s: float) -> None:
        super().__init__(client)
        self._until_s = time.monotonic() + budget_s
        self._token = secrets.token_hex(8)
        self.repaired = 0

    async def run(self) -> None:
        """Run the phases that are left, from where the last run ended; does nothing while another process runs them."""
        with translated():
            await self._redis.set(self._keys.reconciling, self._token, nx=True, ex=LOCK_S)
            if await self._redis.get(self._keys.reconciling) != self._token:  # SET, sent again, finds its own lock
                return
        try:
            await self._run_phases()
        except OutOfTime:
            return
        finally:
            with translated():
                if await self._redis.get(self._keys.reconciling) == self._token:
                    await self._redis.delete(self._keys.reconciling)

    async def _run_phases(self) -> None:
        server = await self._server()
        with translated():
            reached, cursor, known = await self._redis.hmget(self._keys.reconcile_progress, "phase", "cursor", "server")
        if reached not in PHASES or known != server:  # the cursor of a scan means nothing to another server
            reached, cursor = PHASES[0], "0"
        if reached == "footprint":
            self._until_s = max(self._until_s, time.monotonic() + FOOTPRINT_S)
            await self._forget_progress()  # whatever comes of it, the next run begins with the first phase
        for phase in PHASES[PHASES.index(reached) :]:
            if reached != "footprint":
                await self._save(phase, cursor, server)
            if phase == "queued":
                await self._recount_queued()
            elif phase == "running":
                await self._recount_running()
            elif phase == "footprint":
                await self._recount_footprint()
            else:
                async for names, after in self._scan(_SCANNED[phase], cursor):
                    await self._check(phase, names)
                    if after != "0":
                        await self._save(phase, after, server)
            cursor = "0"
        await self._forget_progress()

    async def _forget_progress(self) -> None:
        with translated():
            await self._redis.delete(self._keys.reconcile_progress)

    async def _server(self) -> str:
        with translated():
            try:
                return str((await self._redis.info("server")).get("run_id", ""))
            except ResponseError:  # some services do not allow INFO
                return ""

    async def _save(self, phase: str, cursor: str, server: str) -> None:
        name = self._keys.reconcile_progress
        with translated():
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.hset(name, mapping={"phase": phase, "cursor": cursor, "server": server})
                pipe.expire(name, PROGRESS_S)
                await pipe.execute()
        await self._continue()

    async def _continue(self) -> None:
        """Keep the lock; raises `OutOfTime`."""
        with translated():
            if await self._redis.get(self._keys.reconciling) != self._token or time.monotonic() > self._until_s:
                raise OutOfTime
            await self._redis.expire(self._keys.reconciling, LOCK_S)

    async def _scan(self, kind: _Kind, cursor: str = "0") -> AsyncIterator[tuple[list[str], str]]:
        """Yield pages of the ids of all keys of a kind, with the cursor after each."""
        prefix = f"{self._keys.prefix}{kind}:"
        pattern = "".join(f"\\{char}" if char in "*?[]\\" else char for char in prefix) + "*"
        while True:
            with translated():
                after, names = await self._redis.scan(int(cursor), match=pattern, count=_SCAN_COUNT)
            cursor = str(after)
            yield [name.removeprefix(prefix) for name in names], cursor
            if cursor == "0":
                return

    async def _check(self, phase: str, names: Sequence[str]) -> None:
        repairs = Repairs(self._client)
        check = {"jobs": repairs.check_jobs, "lanes": repairs.check_lanes, "paused": repairs.check_paused}[phase]
        for chunk in _chunks(names, _CHUNK):
            self.repaired += await check(chunk)

    async def _recount_queued(self) -> None:
        """Count the queued jobs of all signatures and tenants again."""
        recount = await self._begin_recount()
        seen: set[str] = set()  # a scan can return a key twice
        tenants: Counter[str] = Counter()
        async for names, _ in self._scan("signature"):
            new = [name for name in dict.fromkeys(names) if name not in seen]
            seen.update(new)
            for chunk in _chunks(new, _CHUNK):
                self.repaired += await recount.signatures(chunk, tenants)
        tenants["*"] = tenants.total()
        self.repaired += await recount.tenants("queued", tenants, await self._tenants_of(self._keys.queued_jobs))
        await recount.end()

    async def _recount_running(self) -> None:
        """Count the running slots of all tenants again."""
        recount = await self._begin_recount()
        running: dict[str, tuple[str, int]] = {}
        cursor = 0
        while True:
            await self._extend_recount()
            with translated():
                cursor, leases = await self._redis.zscan(self._keys.leases, cursor, count=_LEASES)
                async with self._redis.pipeline(transaction=False) as pipe:
                    for job_id, _ in leases:
                        pipe.hmget(self._keys.job(job_id), "state", "tenant", "slots")
                    rows = await pipe.execute()
            for (job_id, _), (state, tenant, slots) in zip(leases, rows, strict=True):
                if state == "running" and tenant:
                    running[job_id] = (tenant, int(slots or 1))
            if not cursor:
                break
        tenants: Counter[str] = Counter()
        for tenant, slots in running.values():
            tenants[tenant] += slots
        self.repaired += await recount.tenants("running", tenants, await self._tenants_of(self._keys.running_slots))
        await recount.end()

    async def _recount_footprint(self) -> None:
        """Count again what tenants keep."""
        recount = await self._begin_recount()
        counted = await FootprintCounter(self._client, self._scan, self._extend_recount).count()
        with translated():
            fields = [field.split("|") async for field, _ in self._redis.hscan_iter(self._keys.footprint)]
        for kind, tenants in counted.totals.items():
            known = [tenant for tenant, name in fields if name == kind]
            self.repaired += await recount.tenants(kind, tenants, known)
        await recount.end()

    async def _extend_recount(self) -> None:
        await self._continue()
        with translated():
            await self._redis.expire(self._keys.recount, LOCK_S)

    async def _begin_recount(self) -> Recount:
        recount = Recount(self._client, self._token, self._extend_recount)
        await recount.begin()
        return recount

    async def _tenants_of(self, name: str) -> list[str]:
        with translated():
            return [tenant async for tenant, _ in self._redis.hscan_iter(name)]


def _chunks(items: Iterable[str], size: int) -> Iterator[list[str]]:
    rows = list(items)
    return (rows[first : first + size] for first in range(0, len(rows), size))
