"""Repairs of jobs and lanes that are not where their state says.

Facts are read of many at once. What looks wrong is read again, and repaired if it is wrong then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from shared.job_fields import Priority
from shared.queue.client import QueueComponent
from shared.queue.connections.errors import translated
from shared.queue.groups import has_state
from shared.queue.maintenance.dependents import UNFINISHED
from shared.queue.maintenance.parent_links import ended_parents, is_link_lost, link_reads
from shared.queue.records import RANKS
from shared.queue.transactions import Command, TooManyConflicts, Transaction

_ENTRIES = 100  # of a lane, read at once
_FIELDS = (
    *("state", "tenant", "sig", "model", "rank", "src", "entry", "slots", "solo"),
    *("deadline", "start_by", "on_deadline", "group", "parents", "sources"),
)
_PARENTS = _FIELDS.index("parents")
_PAUSED = ("state", "src")
_RETURNED = {"solo": "solo", "dated": "dated"}
"""Places of jobs outside of lanes with a set of their own; the others are in `front`."""


class _Check(NamedTuple):
    """What is read, whether the replies show a fault, and its repair. `last`: after it nothing else is checked.

    Not `fenced`: the repair is right whatever is there then, and what is read changes with each claim.
    """

    reads: Sequence[Command]
    fails: Callable[..., bool]
    repair: Callable[[Transaction, Sequence[Any]], None]
    last: bool = False
    fenced: bool = True


class _Lane(NamedTuple):
    signature: str
    priority: Priority
    tenant: str

    @classmethod
    def parse(cls, name: str) -> _Lane | None:
        signature, priority, tenant = name.rsplit("|", 2)
        return cls(signature, Priority(priority), tenant) if priority in set(Priority) else None


class Repairs(QueueComponent):
    async def check_jobs(self, job_ids: Sequence[str]) -> int:
        """Repair jobs, and return how many faults they had."""
        transaction = Transaction(self._client)
        checks = await self._job_checks(transaction, job_ids)
        suspect = await _suspects(transaction, checks)
        repaired = 0
        for job_id in (one for one, fails in zip(job_ids, suspect, strict=True) if fails):
            with suppress(TooManyConflicts):  # the next run finds it again
                repaired += await self._transact(partial(self._repair_job, job_id), when_full=True)
        return repaired

    async def check_lanes(self, names: Sequence[str]) -> int:
        """Repair lanes, `signature|priority|tenant`, and return how many faults they had.

        Entries without a job become dead letters, missing rows of indexes are created.
        """
        lanes = [lane for name in names if (lane := _Lane.parse(name)) is not None]
        repaired = await self._check_entries(lanes)
        transaction = Transaction(self._client)
        checks = [[check] for check in await self._lane_checks(transaction, lanes)]
        suspect = await _suspects(transaction, checks)
        for lane in (one for one, fails in zip(lanes, suspect, strict=True) if fails):
            with suppress(TooManyConflicts):
                repaired += await self._transact(partial(self._repair_lane, lane), when_full=True)
        return repaired

    async def check_paused(self, tenants: Sequence[str]) -> int:
        """Remove jobs that are not paused from the sets of the paused ones of tenants; return how many.

        Those of jobs that an API of an earlier version has canceled stay there.
        """
        removed = 0
        for tenant in tenants:
            with translated():
                found = [str(job_id) async for job_id in self._redis.sscan_iter(self._keys.paused_jobs(tenant))]
            for first in range(0, len(found), _ENTRIES):
                some = found[first : first + _ENTRIES]
                rows = await self._replies([("HMGET", self._keys.job(job_id), *_PAUSED) for job_id in some])
                for job_id in (one for one, row in zip(some, rows, strict=True) if not _is_paused(row)):
                    removed += await self._transact(partial(self._remove_paused, tenant, job_id), when_full=True)
        return removed

    async def _remove_paused(self, tenant: str, job_id: str, transaction: Transaction) -> int:
        (row,) = await transaction.read(("HMGET", self._keys.job(job_id), *_PAUSED))
        if _is_paused(row):
            return 0
        transaction.write("ZREM", self._keys.paused, job_id)
        transaction.write("SREM", self._keys.paused_jobs(tenant), job_id)
        return 1

    async def _repair_job(self, job_id: str, transaction: Transaction) -> int:
        (checks,) = await self._job_checks(transaction, [job_id])
        return await _repair(transaction, checks)

    async def _repair_lane(self, lane: _Lane, transaction: Transaction) -> int:
        return await _repair(transaction, await self._lane_checks(transaction, [lane]))

    # Jobs

    async def _job_checks(self, transaction: Transaction, job_ids: Sequence[str]) -> list[list[_Check]]:
        """Return the checks of jobs; the last event of a job names those that are to be told of its end."""
        rows = await transaction.read(*(("HMGET", self._keys.job(job_id), *_FIELDS) for job_id in job_ids))
        parents = list(dict.fromkeys(parent for row in rows for parent in (row[_PARENTS] or "").split()))
        events = await transaction.read(*(("HGET", self._keys.job(parent), "event") for parent in parents))
        known = dict(zip(parents, events, strict=True))
        return [list(self._checks_of(job_id, row, known)) for job_id, row in zip(job_ids, rows, strict=True)]

    def _checks_of(self, job_id: str, row: Sequence[str | None], events: Mapping[str, str | None]) -> Iterator[_Check]:
        job = {name: value for name, value in zip(_FIELDS, row, strict=True) if value}
        state = job.get("state") if {"tenant", "sig"} <= job.keys() else None
        if state and "group" in job:
            yield self._group_state(job_id, job, state)
        if state in UNFINISHED and "sources" in job:
            yield self._sources(job_id, job["sources"])
        if state == "queued":
            lane = _Lane(job["sig"], RANKS[int(job["rank"])], job["tenant"])
            yield self._place(job_id, job, lane)
            if "parents" in job:
                yield self._parents(job_id, {parent: events[parent] or "" for parent in job["parents"].split()})
            if job.get("src") == "waiting":
                return
            yield from self._deadline(job_id, job)
            if job.get("src") == "paused":
                return
            yield self._model(job)
            if job.get("src") != "lane":
                yield self._orders(lane, job.get("model", ""))
        elif state == "running":
            yield self._lease(job_id)
        else:
            yield self._expiry(job_id)

    def _group_state(self, job_id: str, job: dict[str, str], state: str) -> _Check:
        """Check that the group of a job counts it with its state: a worker of an older version notes none."""
        name = "paused" if state == "queued" and job.get("src") == "paused" else state
        reads = [("ZSCORE", self._keys.group_states(job["tenant"], job["group"]), job_id)]
        return _Check(reads, lambda score: not has_state(score, name), lambda tr, _: tr.call("note_group", job_id))

    def _place(self, job_id: str, job: dict[str, str], lane: _Lane) -> _Check:
        """Check that a queued job is in its lane, or in the sets of those outside of it, paused or for later."""
        keys, place, entry = self._keys, job.get("src"), job.get("entry", "")
        reads: list[Command] = []
        if place == "paused":
            reads += [("ZSCORE", keys.paused, job_id), ("SISMEMBER", keys.paused_jobs(lane.tenant), job_id)]
        elif place == "waiting":
            reads += [("ZSCORE", keys.later, job_id), ("SISMEMBER", keys.later_jobs(lane.tenant), job_id)]
        elif place == "lane":
            reads.append(("XRANGE", keys.lane(*lane), entry or "+", entry or "-"))
        else:
            of_signature = getattr(keys, _RETURNED.get(place or "", "front"))(lane.signature)
            reads += [("ZSCORE", of_signature, job_id), ("ZSCORE", keys.returned(*lane), job_id)]

        def requeue(transaction: Transaction, replies: Sequence[Any]) -> None:
            if place == "waiting":
                return transaction.call("wait", job_id)
            # Where it should have stood.
            if place != "paused":
                transaction.call("uncount", lane.signature, lane.priority.rank, lane.tenant, int(job["slots"]))
            if place == "lane":
                transaction.call("remove_entry", keys.lane(*lane), entry)
            outside = "dated" if place == "dated" else "front"
            transaction.call("requeue", job_id, "solo" if "solo" in job else outside)

        # Those outside of lanes can have lost their parents as well.
        return _Check(reads, lambda *found: not all(found), requeue, last=place not in ("paused", "waiting"))

    def _parents(self, job_id: str, events: Mapping[str, str]) -> _Check:
        """Check that a job waits for each of its parents, or is yet to be told of the end of one."""

        def link(transaction: Transaction, replies: Sequence[Any]) -> None:
            transaction.call("wait_for_parents", job_id, ended_parents(events, replies))

        return _Check(link_reads(self._keys, job_id, events), is_link_lost, link)

    def _sources(self, job_id: str, sources: str) -> _Check:
        """Check that a job is among those for which each of its sources is kept, as far as they are there."""
        pairs = [(self._keys.job(one), self._keys.dependents(one)) for one in sources.split()]
        reads = [read for job, dependents in pairs for read in (("EXISTS", job), ("ZSCORE", dependents, job_id))]

        def is_missing(*found: Any) -> bool:
            return any(exists and since is None for exists, since in zip(found[::2], found[1::2], strict=True))

        return _Check(reads, is_missing, lambda tr, _: tr.call("hold_sources", job_id, sources))

    def _deadline(self, job_id: str, job: dict[str, str]) -> Iterator[_Check]:
        if "start_by" in job or ("deadline" in job and job.get("on_deadline") != "run"):
            index = self._keys.deadlines if "start_by" in job else self._keys.late
            reads = [("ZSCORE", index, job_id)]
            yield _Check(reads, _is_missing, lambda transaction, _: transaction.call("list_deadline", job_id))

    def _model(self, job: dict[str, str]) -> _Check:
        """Check that the signature of a job has its model; its counters are repaired after all jobs and lanes."""
        name = self._keys.signature(job["sig"])
        reads = [("HGET", name, "model")]
        return _Check(reads, _is_missing, lambda tr, _: tr.write("HSETNX", name, "model", job.get("model", "")))

    def _lease(self, job_id: str) -> _Check:
        """Check that a running job has a lease: its worker can be alive, and renews it; otherwise it expires."""
        lease_ms = self._client.policy("lease_ms")

        def add(transaction: Transaction, _: Sequence[Any]) -> None:
            transaction.write("ZADD", self._keys.leases, "NX", transaction.now_ms + lease_ms, job_id)

        return _Check([("ZSCORE", self._keys.leases, job_id)], _is_missing, add)

    def _expiry(self, job_id: str) -> _Check:
        """Check that the record of a job that has ended expires, unless others start from its artifacts."""
        name, kept_ms = self._keys.job(job_id), 1000 * self._client.policy("retention_s")
        reads: list[Command] = [("TTL", name), ("EXISTS", self._keys.dependents(job_id))]

        def change(transaction: Transaction, replies: Sequence[Any]) -> None:
            transaction.write(*(("PERSIST", name) if replies[1] else ("PEXPIRE", name, kept_ms)))

        return _Check(reads, lambda ttl, needed: ttl >= 0 if needed else ttl == -1, change)

    def _orders(self, lane: _Lane, model: str, head: str | None = None) -> _Check:
        """Check a lane's place in the orders, and its tenant's signatures; `head` is the first entry of its stream."""
        keys, (signature, priority, tenant) = self._keys, lane
        reads: list[Command] = [
            ("ZSCORE", keys.lanes(signature, priority.value), tenant),
            ("ZSCORE", keys.tenant_signatures(tenant, model, priority.value), signature),
            ("ZSCORE", keys.lane_order(signature, priority.value), tenant),
            ("ZSCORE", keys.tenant_order(model, priority.value), tenant),
            ("SISMEMBER", keys.deferred(tenant), f"{model}|{priority.rank}"),
        ]

        def fails(place: str | None, *orders: str | int | None) -> bool:
            of_tenant, of_signature, order, deferred = orders
            has_place = head is None or place is not None
            return not has_place or of_tenant is None or of_signature is None or not (order or deferred)

        def update(transaction: Transaction, _: Sequence[Any]) -> None:
            transaction.write("HSETNX", keys.signature(signature), "model", model)
            transaction.call("update_lane", model, signature, priority.rank, tenant)

        return _Check(reads, fails, update, fenced=False)

    # Lanes

    async def _lane_checks(self, transaction: Transaction, lanes: Sequence[_Lane]) -> list[_Check]:
        """Return the checks of lanes; a lost signature gets the model of the first job of a lane."""
        reads: list[Command] = []
        for lane in lanes:
            reads += [
                ("XRANGE", self._keys.lane(*lane), "-", "+", "COUNT", 1),
                ("HGET", self._keys.signature(lane.signature), "model"),
                ("EXISTS", self._keys.returned(*lane)),
            ]
        replies = await transaction.read(*reads)
        checks = []
        for lane, (heads, model, returned) in zip(lanes, zip(*[iter(replies)] * 3, strict=True), strict=True):
            if heads and model is None:
                (model,) = await transaction.read(("HGET", self._keys.job(_job_of(heads[0][1])), "model"))
            if model and (heads or returned):
                checks.append(self._orders(lane, model, heads[0][0] if heads else None))
            elif heads or returned:
                checks.append(_Check((), lambda: False, lambda *_: None))
            else:
                checks.append(self._empty(lane, model))
        return checks

    def _empty(self, lane: _Lane, model: str | None) -> _Check:
        """Check that a lane without jobs is in no index, and no key."""
        name, index = self._keys.lane(*lane), self._keys.lanes(lane.signature, lane.priority.value)

        def delete(transaction: Transaction, _: Sequence[Any]) -> None:
            transaction.write("DEL", name)
            transaction.write("ZREM", index, lane.tenant)
            if model is not None:
                transaction.call("update_lane", model, lane.signature, lane.priority.rank, lane.tenant)

        return _Check([("ZSCORE", index, lane.tenant), ("EXISTS", name)], lambda *found: any(found), delete)

    async def _check_entries(self, lanes: Sequence[_Lane]) -> int:
        """Remove entries of lanes that are not their queued job's current one."""
        pages, repaired = dict.fromkeys(lanes, "-"), 0
        while pages:
            reads = [("XRANGE", self._keys.lane(*lane), after, "+", "COUNT", _ENTRIES) for lane, after in pages.items()]
            found = dict(zip(pages, await Transaction(self._client).read(*reads), strict=True))
            entries = [(lane, entry, _job_of(fields)) for lane, rows in found.items() for entry, fields in rows]
            jobs = [("HMGET", self._keys.job(job_id), "state", "entry") for _, _, job_id in entries]
            states = await Transaction(self._client).read(*jobs)
            for (lane, entry, job_id), (state, current) in zip(entries, states, strict=True):
                if (state, current) != ("queued", entry):
                    attempt = partial(self._remove_entry, lane, entry, job_id)
                    repaired += await self._transact(attempt, when_full=True)
            pages = {lane: f"({rows[-1][0]}" for lane, rows in found.items() if len(rows) == _ENTRIES}
        return repaired

    async def _remove_entry(self, lane: _Lane, entry: str, job_id: str, transaction: Transaction) -> int:
        name = self._keys.lane(*lane)
        rows, (state, current) = await transaction.read(
            ("XRANGE", name, entry, entry), ("HMGET", self._keys.job(job_id), "state", "entry")
        )
        if not rows or (state, current) == ("queued", entry):
            return 0
        transaction.call("remove_entry", name, entry)
        if state is None:
            letter = job_id or "|".join((lane.signature, lane.priority.value, lane.tenant, entry))
            transaction.call("bury", letter, "no_record", f"entry without a job: {lane.signature}")
        return 1


def _is_paused(row: Sequence[str | None]) -> bool:
    return tuple(row) == ("queued", "paused")


def _is_missing(reply: object) -> bool:
    return reply is None


def _job_of(fields: Sequence[str]) -> str:
    return dict(zip(fields[::2], fields[1::2], strict=True)).get("job", "")


async def _suspects(transaction: Transaction, checks: Sequence[Sequence[_Check]]) -> list[bool]:
    """Return for each list of checks whether one fails."""
    replies = iter(await transaction.read(*(read for some in checks for check in some for read in check.reads)))
    found = [[check.fails(*islice(replies, len(check.reads))) for check in some] for some in checks]
    return list(map(any, found))


async def _repair(transaction: Transaction, checks: Iterator[_Check] | Sequence[_Check]) -> int:
    """Repair what fails; return how much that is."""
    repaired = 0
    for check in checks:
        replies = await transaction.read(*check.reads, fenced=check.fenced)
        if check.fails(*replies):
            check.repair(transaction, replies)
            repaired += 1
            if check.last:
                break
    return repaired
