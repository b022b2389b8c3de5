"""Samples of the queue for autoscaling: tenants at their limits, and bulk jobs with a deadline.

What is read is bounded, whatever is queued; the rest counts like it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from shared.autoscaling import DatedSlots, LimitedTenant
from shared.batch import BatchStatus
from shared.job_fields import Priority
from shared.queue.client import QueueComponent
from shared.queue.connections.errors import translated
from shared.queue.order.policies import Limit
from shared.queue.records import RANKS, ModelDepth
from shared.queue.workers.running_limits import RunningLimits

_DEADLINES = 128
_TENANTS = 1000
_ORDERS = 600  # of tenants, models and priorities
_LANES = 4  # of an order


class BacklogSample(QueueComponent):
    async def queued_jobs(self) -> dict[str, int]:
        """Return the number of queued jobs by tenant, of those with any."""
        with translated():
            counts = await self._redis.hgetall(self._keys.queued_jobs)
        return {tenant: int(jobs) for tenant, jobs in counts.items() if tenant != "*" and int(jobs) > 0}

    async def limited_tenants(
        self, models: Sequence[ModelDepth], queued: Mapping[str, int], paused: AbstractSet[str]
    ) -> list[LimitedTenant]:
        """Return tenants with more queued jobs than their limit of running slots lets start; a paused one's is 0."""
        names = dict.fromkeys([*heapq.nlargest(_TENANTS, queued, key=queued.__getitem__), *(paused & queued.keys())])
        limits = await RunningLimits(self._client).of(list(names), paused)
        beyond = [name for name, limit in limits.items() if limit.holds_some_back(queued[name])]
        read = beyond[: max(1, _ORDERS // (len(RANKS) * len(models) or 1))]
        if not read:
            return []
        weight = sum(queued[name] for name in beyond) / sum(queued[name] for name in read)
        parts = await self._lane_jobs(read, [one.model for one in models])
        return [_limited_tenant(name, limits[name], queued[name], weight, parts[name], models) for name in read]

    async def _lane_jobs(
        self, tenants: Sequence[str], models: Sequence[str]
    ) -> dict[str, Counter[tuple[str, Priority]]]:
        """Return about how many jobs the tenants have in their lanes, by model and priority."""
        orders = [(tenant, model, priority) for tenant in tenants for model in models for priority in RANKS]
        lanes: list[tuple[str, str, Priority, float]] = []
        with translated():
            async with self._redis.pipeline(transaction=False) as pipe:
                for tenant, model, priority in orders:
                    pipe.zrange(self._keys.tenant_signatures(tenant, model, priority.value), 0, _LANES - 1)
                    pipe.zcard(self._keys.tenant_signatures(tenant, model, priority.value))
                rows = await pipe.execute()
            async with self._redis.pipeline(transaction=False) as pipe:
                for (tenant, model, priority), signatures, count in zip(orders, rows[::2], rows[1::2], strict=True):
                    for signature in signatures:
                        pipe.xlen(self._keys.lane(signature, priority.value, tenant))
                        lanes.append((tenant, model, priority, count / len(signatures)))
                lengths = await pipe.execute()
        jobs: dict[str, Counter[tuple[str, Priority]]] = {tenant: Counter() for tenant in tenants}
        for (tenant, model, priority, scale), length in zip(lanes, lengths, strict=True):
            jobs[tenant][model, priority] += max(1, round(scale * length))  # returned jobs are in no stream
        return jobs

    async def dated_slots(self) -> list[DatedSlots]:
        """Return bulk slots with a deadline, from an even sample of all jobs with one, and lines of their batches.

        Late jobs that expire are due at once; those that run late instead count as jobs without a deadline.
        """
        with translated():
            ids, weight = await self._dated_jobs()
            async with self._redis.pipeline(transaction=False) as pipe:
                for job_id, _ in ids:
                    pipe.hmget(self._keys.job(job_id), "model", "tenant", "rank", "slots", "batch", "left", "src")
                jobs = [_DatedJob(*row) for row in await pipe.execute()]
            due = [(job, due_s) for job, (_, due_s) in zip(jobs, ids, strict=True) if job.counts]
            batches = {(job.tenant, job.batch): (job, due_s) for job, due_s in due if job.batch}
            async with self._redis.pipeline(transaction=False) as pipe:
                for tenant, batch in batches:
                    pipe.hmget(self._keys.batch(tenant, batch), "status", "total", "read")
                lines = await pipe.execute()
        queued = [DatedSlots(job.model, job.tenant, due_s, queued=job.work_slots * weight) for job, due_s in due]
        return queued + [
            DatedSlots(job.model, job.tenant, due_s, in_files=int(job.slots) * (int(total) - int(done or 0)))
            for (job, due_s), (status, total, done) in zip(batches.values(), lines, strict=True)
            if status == BatchStatus.IN_PROGRESS and total
        ]

    async def _dated_jobs(self) -> tuple[list[tuple[str, float]], float]:
        """Return an even sample of the late jobs and of those before their latest start, and how many each stands for.

        The sample has the ids and the seconds until they are due.
        """
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.zcard(self._keys.late)
            pipe.zcard(self._keys.deadlines)
            late, dated = await pipe.execute()
        read = min(late + dated, _DEADLINES)
        weight = (late + dated) / max(1, read)
        places = [int((at + 0.5) * weight) for at in range(read)]
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.time()
            for place in places:
                name, at = (self._keys.late, place) if place < late else (self._keys.deadlines, place - late)
                pipe.zrange(name, at, at, withscores=True)
            (seconds, _), *rows = await pipe.execute()
        ids = [
            (row[0][0], 0.0 if place < late else row[0][1] / 1000 - seconds)
            for place, row in zip(places, rows, strict=True)
            if row
        ]
        return ids, weight


class _DatedJob(NamedTuple):
    model: str
    tenant: str
    rank: str
    slots: str
    batch: str | None
    left: str | None
    place: str | None

    @property
    def work_slots(self) -> float:
        """Its slots as far as a checkpoint leaves work of them."""
        return int(self.slots) * float(self.left or 1)

    @property
    def counts(self) -> bool:
        """Whether it is a bulk job that no client has paused: no worker is wanted for a paused one."""
        is_bulk = self.rank is not None and RANKS[int(self.rank)] is Priority.BULK
        return is_bulk and self.place != "paused"


def _limited_tenant(
    name: str,
    limit: Limit,
    queued: int,
    weight: float,
    parts: Counter[tuple[str, Priority]],
    models: Sequence[ModelDepth],
) -> LimitedTenant:
    """Return the limit and the jobs of as many tenants as `weight`, all like this one.

    Queued jobs are split like `parts`; those of a model and priority have its mean number of slots.
    """
    urgent: dict[str, float] = {}
    bulk: dict[str, float] = {}
    slots = {(one.model, rank): one.slots[rank] / one.jobs[rank] for one in models for rank in RANKS if one.jobs[rank]}
    for (model, priority), part in parts.items():
        kind = bulk if priority is Priority.BULK else urgent
        own = weight * queued * part / parts.total() * slots.get((model, priority), 1.0)
        kind[model] = kind.get(model, 0.0) + own
    most = 0 if limit.paused else limit.most
    return LimitedTenant(name, weight * most, weight * limit.used, urgent, bulk)
