"""Counting again: queued jobs, running slots and what tenants keep, concurrently with other work.

A count takes many commands. What changes meanwhile can be counted or not, so scripts note these changes
(`recount.lua`), and only the part of a difference that they cannot explain is repaired.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

from shared.job_fields import Priority
from shared.queue.client import QueueClient, QueueComponent
from shared.queue.connections.errors import translated
from shared.queue.records import RANKS
from shared.queue.transactions import Transaction

LOCK_S = 60
_PAGE = 500
_PLACE = ("state", "src", "rank", "tenant")


class _Set(NamedTuple):
    """A set of queued jobs of a signature: the lanes of a rank, or jobs outside of lanes (`rank` is None)."""

    signature: str
    rank: Priority | None = None


class _Counter(NamedTuple):
    """A counter, the name of its notes, what was counted, and how many changes were noted before."""

    key: str
    field: str
    note: str
    counted: int
    noted_before: int = 0


class Recount(QueueComponent):
    """One count; `extend` is called before each page. It must have begun."""

    def __init__(self, client: QueueClient, token: str, extend: Callable[[], Awaitable[None]]) -> None:
        super().__init__(client)
        self._token, self._extend = token, extend

    async def begin(self) -> None:
        with translated():
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.delete(self._keys.recount)
                pipe.hset(self._keys.recount, "token", self._token)
                pipe.expire(self._keys.recount, LOCK_S)
                await pipe.execute()

    async def end(self) -> None:
        with translated():
            await self._redis.delete(self._keys.recount)

    async def signatures(self, signatures: Sequence[str], tenants: Counter[str]) -> int:
        """Count the queued jobs of signatures, add them to those of their tenants, and return how many were wrong."""
        counters = [(signature, rank.rank) for signature in signatures for rank in RANKS]
        notes = [f"jobs|{signature}|{rank}" for signature, rank in counters]
        await self._extend()
        with translated():
            before = await self._redis.hmget(self._keys.recount, notes)
        totals: Counter[tuple[str, int]] = Counter()
        for (signature, rank, tenant, _), jobs in (await self._count(signatures)).items():
            totals[signature, rank] += jobs
            tenants[tenant] += jobs
        found = [
            _Counter(self._keys.signature(one[0]), f"jobs:{one[1]}", note, totals[one], int(noted or 0))
            for one, note, noted in zip(counters, notes, before, strict=True)
        ]
        wrong = await self._repair(found, _write_signature)
        await self._transact(partial(_refresh, signatures), when_full=True)
        return wrong

    async def tenants(self, kind: str, counted: Mapping[str, int], known: Iterable[str]) -> int:
        """Repair the counters of tenants, `*` for all: `queued`, `running`, or a number of `Footprint`."""
        names = {"queued": self._keys.queued_jobs, "running": self._keys.running_slots}
        write = _write_running if kind == "running" else _write_tenant
        rows, wrong = list(dict.fromkeys([*counted, *known])), 0
        for first in range(0, len(rows), _PAGE):
            await self._extend()
            found = []
            for tenant in rows[first : first + _PAGE]:
                key, field = names.get(kind, self._keys.footprint), tenant if kind in names else f"{tenant}|{kind}"
                found.append(_Counter(key, field, f"{kind}|{tenant}", counted.get(tenant, 0)))
            wrong += await self._repair(found, write)
        return wrong

    async def _count(self, signatures: Sequence[str]) -> dict[tuple[str, int, str, str], int]:
        """Return queued jobs by signature, rank, tenant, and lane or job: a scan can return a member twice."""
        sets = {self._keys.lanes(one, rank.value): _Set(one, rank) for one in signatures for rank in RANKS}
        for one in signatures:
            sets |= {name(one): _Set(one) for name in (self._keys.front, self._keys.solo, self._keys.dated)}
        counted: dict[tuple[str, int, str, str], int] = {}
        async for members in self._members(sets):
            await self._extend()
            reads = [self._read_of(sets[name], member) for name, member in members]
            for (name, member), reply in zip(members, await self._replies(reads), strict=True):
                signature, priority = sets[name]
                if priority is not None:
                    counted[signature, priority.rank, member, member] = reply
                elif _is_outside(reply):
                    counted[signature, int(reply[2]), reply[3], name + member] = 1
                else:
                    await self._transact(partial(self._remove, signature, name, member), when_full=True)
        return counted

    def _read_of(self, of: _Set, member: str) -> tuple[str, ...]:
        if of.rank is None:
            return "HMGET", self._keys.job(member), *_PLACE
        return "XLEN", self._keys.lane(of.signature, of.rank.value, member)

    async def _members(self, names: Iterable[str]) -> AsyncIterator[list[tuple[str, str]]]:
        """Yield the members of sets in pages, with the names of their sets."""
        cursors = dict.fromkeys(names, 0)
        while cursors:
            pages = await self._replies([("ZSCAN", name, cursor, "COUNT", _PAGE) for name, cursor in cursors.items()])
            found = [(name, member) for name, (_, rows) in zip(cursors, pages, strict=True) for member, _ in rows]
            for first in range(0, len(found), _PAGE):
                yield found[first : first + _PAGE]
            following = {name: int(cursor) for name, (cursor, _) in zip(cursors, pages, strict=True)}
            cursors = {name: cursor for name, cursor in following.items() if cursor}

    async def _remove(self, signature: str, name: str, job_id: str, transaction: Transaction) -> None:
        """Remove a job that is not queued outside of its lane from a set of those that are."""
        (row,) = await transaction.read(("HMGET", self._keys.job(job_id), *_PLACE))
        if _is_outside(row):
            return
        transaction.write("ZREM", name, job_id)
        if row[2] and row[3]:
            returned = self._keys.returned(signature, RANKS[int(row[2])].value, row[3])
            transaction.write("ZREM", returned, job_id)

    async def _repair(self, counters: Sequence[_Counter], write: _Write) -> int:
        """Repair the certain part of differences; return how many there were.

        What is missing is added, so that counters may change meanwhile: only the recount itself must be in progress.
        """
        return await self._transact(partial(self._repair_all, counters, write), when_full=True)

    async def _repair_all(self, counters: Sequence[_Counter], write: _Write, transaction: Transaction) -> int:
        (token,) = await transaction.read(("HGET", self._keys.recount, "token"))
        reads = [read for one in counters for read in self._reads_of(one)]
        replies = await transaction.read(*reads, fenced=False)
        wrong = 0
        for counter, number, noted in zip(counters, replies[::2], replies[1::2], strict=True):
            changes = max(0, int(noted or 0) - counter.noted_before)
            missing = certain(int(number or 0), counter.counted, changes) if token == self._token else 0
            if missing:
                await write(transaction, counter, missing)
                wrong += 1
        return wrong

    def _reads_of(self, counter: _Counter) -> tuple[tuple[str, str, str], ...]:
        return ("HGET", counter.key, counter.field), ("HGET", self._keys.recount, counter.note)


_Write: TypeAlias = Callable[[Transaction, _Counter, int], Awaitable[None]]


def _is_outside(row: Sequence[str | None]) -> bool:
    """Return whether a job is queued outside of its lane, neither paused nor for later."""
    state, place, rank, tenant = row
    return state == "queued" and place not in ("lane", "paused", "waiting") and bool(rank and tenant)


async def _write_signature(transaction: Transaction, counter: _Counter, missing: int) -> None:
    slots = counter.field.replace("jobs", "slots")
    (known,) = await transaction.read(("HEXISTS", counter.key, "model"))
    if not known:  # nothing is queued or running any more
        return
    (numbers,) = await transaction.read(("HMGET", counter.key, counter.field, slots), fenced=False)
    jobs, own_slots = (int(number or 0) for number in numbers)
    # Slots by the mean of the old counters: they only decide how soon a batch is full.
    mean = max(1.0, own_slots / jobs) if jobs > 0 else 1.0
    transaction.write("HINCRBY", counter.key, counter.field, missing)
    transaction.write("HINCRBY", counter.key, slots, round((jobs + missing) * mean) - own_slots)


async def _write_running(transaction: Transaction, counter: _Counter, missing: int) -> None:
    transaction.call("count_running", counter.field, missing)


async def _write_tenant(transaction: Transaction, counter: _Counter, missing: int) -> None:
    transaction.call("add", counter.key, counter.field, missing)


async def _refresh(signatures: Iterable[str], transaction: Transaction) -> None:
    for signature in signatures:
        transaction.call("refresh_signature", signature)


def certain(counter: int, counted: int, changes: int) -> int:
    """Return by how much a counter is certainly wrong, where so many changes can be counted or not."""
    difference = counted - counter
    return max(0, difference - changes) if difference > 0 else min(0, difference + changes)
