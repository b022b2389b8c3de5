"""Compares the queue in Redis with the model, through the queue's reads and its counters."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any, TypeAlias

from integration.queue_model.model import QueueModel

from shared.job import InputRef, State
from shared.queue import Queue
from shared.queue.maintenance.tenant_usage import UsageQuery
from shared.queue.records import RANKS

Entry: TypeAlias = tuple[str, dict[str, str]]

SUBSCRIBED = {"b": (State.SUCCEEDED, State.FAILED)}
"""States for which an endpoint of the tenant gets webhooks."""

KEPT = {
    "dead_letters",
    "dead_letters_added",
    "events",
    "footprint",
    "inputs:a",
    "inputs:b",
    "inputs:c",
    "outbox_tenants",
    "reclaims",
    "retention",
    "tenant_limits",
    "wakeup",
    "webhook_endpoints:b",
    "webhook_outbox:a",
    "webhook_outbox:b",
    "webhook_outbox:c",
}
"""Keys without a TTL that may remain when every job has ended and is forgotten: streams and sets with a maximal length,
a counter, what is yet to be sent, what users have set, and rows that a later sweep removes."""


DEPTHS_EVERY = 4
GROUP = "g"
"""The group of some jobs of each tenant."""


class Checker:
    """Reads events and outbox from where the last check ended."""

    def __init__(self, queue: Queue, model: QueueModel, inputs: dict[str, InputRef]) -> None:
        self.queue, self.model, self.inputs = queue, model, inputs
        self._last = {"events": "-", **dict.fromkeys(inputs, "-")}
        self._checked = self._checks = 0

    async def check(self) -> None:
        await self._records()
        found = await self._read()
        self._counters(found)
        self._inputs(found["inputs"])
        self._changes(found["events"], found["outbox"])
        self._checks += 1
        if self._checks % DEPTHS_EVERY == 0:
            await self._depths()
            await self._usage()
            await self._groups()
            await self._dependents()

    async def _records(self) -> None:
        ids = list(self.model.jobs)
        for job_id, record in zip(ids, await self.queue.jobs.get_many(ids), strict=True):
            job = self.model.jobs[job_id]
            if job.forgotten:
                assert record is None, f"{job_id} is forgotten and has a record"
                continue
            assert record is not None, f"{job_id} has no record"
            seen = (record.state, record.epoch, record.losses, record.cancel_requested, record.paused_at_ms is not None)
            assert seen == (job.state, job.epoch, job.losses, job.cancel, job.paused), job_id
            assert record.waits == job.waiting, job_id
            assert record.state is not State.RUNNING or record.worker == job.worker
            assert (record.expires_at_ms is not None) == job.state.terminal

    async def _read(self) -> dict[str, Any]:
        """Read in one round trip what the queue's API does not return."""
        keys = self.queue.client.redis_keys
        names = (
            "queued_jobs",
            "running_slots",
            "claimed_jobs",
            "footprint",
            "leases",
            "deadlines",
            "late",
            "paused",
            "later",
            "events",
        )
        names = (*names, *self.inputs)
        async with self.queue.client.redis.pipeline(transaction=False) as pipe:
            for name in (keys.queued_jobs, keys.running_slots, keys.claimed_jobs, keys.footprint):
                pipe.hgetall(name)
            for name in (keys.leases, keys.deadlines, keys.late, keys.paused, keys.later):
                pipe.zrange(name, 0, -1)
            pipe.xrange(keys.events, min=self._last["events"])
            for tenant in self.inputs:
                pipe.xrange(keys.webhook_outbox(tenant), min=self._last[tenant])
            for tenant, ref in self.inputs.items():
                pipe.hget(keys.input(tenant, ref.id), "live")
            replies = await pipe.execute()
        found = dict(zip(names, replies, strict=False))
        for stream in self._last:
            if found[stream]:
                self._last[stream] = f"({found[stream][-1][0]}"
        found["outbox"] = sorted((row for tenant in self.inputs for row in found[tenant]), key=_event)
        return found | {"inputs": dict(zip(self.inputs, replies[len(names) :], strict=True))}

    def _counters(self, found: dict[str, Any]) -> None:
        model = self.model
        queued, running = model.queued(), model.running()
        in_lanes = [job for job in queued.values() if job.in_lane]
        by_tenant = model.count(in_lanes, lambda job: job.tenant, slots=False)
        total = {"*": len(in_lanes)} if in_lanes else {}
        by_worker = model.count(running.values(), lambda job: job.worker, slots=False)
        assert _numbers(found["queued_jobs"]) == by_tenant | total
        assert _numbers(found["running_slots"]) == model.count(running.values(), lambda job: job.tenant, slots=True)
        assert _numbers(found["claimed_jobs"]) == by_worker
        kept = model.count(
            (job for job in model.jobs.values() if not job.forgotten), lambda job: job.tenant, slots=False
        )
        total = {"*": sum(kept.values())} if kept else {}
        rows = {field.partition("|"): int(value) for field, value in found["footprint"].items()}
        objects = len(self.inputs) + sum(job.objects for job in model.jobs.values() if not job.forgotten)
        assert rows.get(("*", "|", "stored_objects"), 0) == objects, "objects in storage"
        assert {tenant: number for (tenant, _, name), number in rows.items() if name == "kept_jobs"} == kept | total
        assert set(found["leases"]) == set(running)
        assert set(found["paused"]) == {job_id for job_id, job in queued.items() if job.paused}
        assert set(found["later"]) == {job_id for job_id, job in queued.items() if job.waiting and not job.paused}
        assert sorted(found["deadlines"] + found["late"]) == sorted(
            job_id for job_id, job in queued.items() if job.is_listed
        )

    def _inputs(self, live: dict[str, str | None]) -> None:
        """Check that each input is held by exactly the unfinished jobs that use it."""
        unfinished = (*self.model.queued().values(), *self.model.running().values())
        users = Counter(job.tenant for job in unfinished if any(ref.id for ref in job.submission.job.images))
        assert {tenant: int(number or 0) for tenant, number in live.items()} == {
            tenant: users[tenant] for tenant in live
        }

    def _changes(self, events: list[Entry], outbox: list[Entry]) -> None:
        """Check that each change since the last check is published once, and is in the outbox once if it is wanted."""
        published = [(fields["job"], State(fields["state"])) for _, fields in events]
        expected = self.model.events[self._checked :]
        self._checked = len(self.model.events)
        # A script publishes the changes of several jobs in its own order.
        assert sorted(published, key=_job) == sorted(expected, key=_job)
        wanted = [(event_id, *sent) for event_id, fields in events if (sent := self._wanted(fields)) is not None]
        assert [(row["event"], row["job"], row["state"], row["url"]) for _, row in outbox] == wanted

    def _wanted(self, fields: dict[str, str]) -> tuple[str, str, str] | None:
        """Return the row of the outbox for an event, if its job's webhook or an endpoint of the tenant wants it."""
        job, state = self.model.jobs[fields["job"]], State(fields["state"])
        hook = job.submission.job.webhook
        url = hook.url if hook is not None and state in hook.states else ""
        wanted = url or state in SUBSCRIBED.get(job.tenant, ())
        return (fields["job"], state.value, url) if wanted else None

    async def _depths(self) -> None:
        seen, expected = {}, {}
        for depth in await self.queue.workers.queue_depths():
            seen[depth.signature] = [*depth.jobs.values(), *depth.slots.values(), depth.running_jobs]
        in_lanes = [job for job in self.model.queued().values() if job.in_lane]
        for job in (*in_lanes, *self.model.running().values()):
            numbers = expected.setdefault(job.submission.signature, [0] * (2 * len(RANKS) + 1))
            if job.state is State.QUEUED:
                numbers[job.rank] += 1
                numbers[len(RANKS) + job.rank] += job.slots
            else:
                numbers[-1] += 1
        assert seen == expected, "queued jobs and slots by priority, and running jobs"

    async def _usage(self) -> None:
        """Check that each end of a job is counted once."""
        today = await self.queue.usage.today()
        query = UsageQuery(today - timedelta(days=1), today, groups=frozenset({"tenant"}))
        rows, _ = await self.queue.usage.page(query, None, 100)
        ends = ("succeeded", "failed", "canceled", "expired")
        seen = {(row.tenant, end): number for row in rows for end in ends if (number := getattr(row.sum, end))}
        events = self.model.events
        assert seen == Counter((self.model.jobs[job_id].tenant, end.value) for job_id, end in events if end.terminal)

    async def _groups(self) -> None:
        """Check that a group has each of its jobs once, with its state, and ends with the last one."""
        expected: dict[str, Counter[str]] = {}
        for job in self.model.jobs.values():
            if job.submission.job.group is not None and not job.forgotten:
                state = "paused" if job.paused and job.state is State.QUEUED else job.state.value
                expected.setdefault(job.tenant, Counter())[state] += 1
        for tenant in self.inputs:
            groups, _ = await self.queue.groups.page(tenant, None, 10)
            seen = {group.name: {name: count for name, count in group.jobs.items() if count} for group in groups}
            assert seen == ({GROUP: expected[tenant]} if tenant in expected else {}), tenant

    async def _dependents(self) -> None:
        """Check that each job is kept for exactly those that start from it, and that its record then has no TTL."""
        keys, ids = self.queue.client.redis_keys, list(self.model.jobs)
        async with self.queue.client.redis.pipeline(transaction=False) as pipe:
            for job_id in ids:
                pipe.zrange(keys.dependents(job_id), 0, -1)
                pipe.ttl(keys.job(job_id))
            replies = await pipe.execute()
        for job_id, children, ttl in zip(ids, replies[::2], replies[1::2], strict=True):
            job = self.model.jobs[job_id]
            assert set(children) == self.model.dependents(job_id), job_id
            assert job.forgotten or (ttl >= 0) == (job.state.terminal and not children), job_id


def _event(entry: Entry) -> tuple[int, ...]:
    return tuple(map(int, entry[1]["event"].split("-")))


def _job(change: tuple[str, State]) -> str:
    return change[0]


def _numbers(fields: dict[str, str]) -> dict[str, int]:
    return {name: int(value) for name, value in fields.items()}
