"""The queued jobs of a simulation, as facts for `shared.queue.order`."""

from __future__ import annotations

import bisect
import math
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from bench.simulator.kinds import MAX_BATCH, JobKind, SimulatedJob
from bench.simulator.learned import Readiness
from shared.queue.order.decision import Decision
from shared.queue.order.facts import (
    LaneFacts,
    OrderFacts,
    QueuedJob,
    QueueFacts,
    SignatureFacts,
    SignatureQueue,
    TenantFacts,
)
from shared.queue.order.policies import Limit, OrderPolicies

POLICIES = OrderPolicies(overdue_ms=2_000, aging_ms=30_000, bulk_share=0.0, interactive_allowance_s=0.0)
STANDARD, BULK = 1, 2
START_LEAD_MS = 1000
"""A job with a deadline makes its signature ready this long before its latest start."""

OLDEST_READ = 4
"""Jobs with a latest start of which the oldest is looked for, as in `dated.lua`."""


class Lane(NamedTuple):
    """The jobs of one signature, priority and tenant."""

    kind: JobKind
    rank: int
    tenant: str

    @property
    def bulk(self) -> bool:
        return self.rank == BULK


@dataclass
class LaneJobs:
    """The jobs of a lane by arrival, and those with a latest start by it."""

    stream: deque[SimulatedJob] = field(default_factory=deque)
    dated: list[SimulatedJob] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.stream) + len(self.dated)

    def __iter__(self) -> Iterator[SimulatedJob]:
        yield from self.dated
        yield from self.stream

    @property
    def oldest_s(self) -> float:
        first = (self.stream[0].arrival.at_s,) if self.stream else ()
        return min((*first, *(job.arrival.at_s for job in self.dated[:OLDEST_READ])), default=math.inf)

    @property
    def start_by_ms(self) -> int | None:
        return self.dated[0].start_by_ms if self.dated else None


class SimulatedQueue:
    """Queued jobs, each of one slot. `limits` are running slots by tenant."""

    def __init__(self, window_s: float = 0.0, limits: Mapping[str, int] | None = None) -> None:
        self.limits = limits or {}
        self.running: Counter[str] = Counter()
        """Slots in use by tenant."""

        self._readiness = Readiness(window_s)
        self.by_kind: dict[JobKind, dict[Lane, LaneJobs]] = {}
        """All lanes that ever had jobs."""

        self._overtaken: Counter[tuple[str, int]] = Counter()

    def lanes(self) -> Iterator[tuple[Lane, LaneJobs]]:
        """Yield the lanes with queued jobs."""
        for lanes in self.by_kind.values():
            yield from ((lane, jobs) for lane, jobs in lanes.items() if jobs)

    def of_kind(self, kind: JobKind) -> Iterator[tuple[Lane, LaneJobs]]:
        return ((lane, jobs) for lane, jobs in self.by_kind.get(kind, {}).items() if jobs)

    def kinds(self) -> list[JobKind]:
        """Return the kinds with queued jobs."""
        return [kind for kind, lanes in self.by_kind.items() if any(lanes.values())]

    # Changes

    def add(self, job: SimulatedJob) -> None:
        self._readiness.add(job.kind, job.arrival.at_s)
        jobs = self.jobs_of(job)
        if job.start_by_ms is None:
            jobs.stream.append(job)
        else:
            bisect.insort(jobs.dated, job, key=lambda one: (one.start_by_ms, one.number))

    def put_back(self, job: SimulatedJob) -> None:
        """Queue a job of a stopped worker again, before the others of its lane."""
        self.running[job.arrival.tenant] -= 1
        self.jobs_of(job).stream.appendleft(job)

    def jobs_of(self, job: SimulatedJob) -> LaneJobs:
        """Return the jobs of a job's lane."""
        rank = BULK if job.arrival.bulk else STANDARD
        lane = Lane(job.kind, rank, job.arrival.tenant)
        return self.by_kind.setdefault(job.kind, {}).setdefault(lane, LaneJobs())

    def take(self, kind: JobKind, decision: Decision) -> list[SimulatedJob]:
        """Remove the jobs of a decision, and return them."""
        chosen, overtaken = {job.id for job in decision.take}, Counter(decision.overtaken_jobs)
        taken = []
        for _, jobs in self.of_kind(kind):
            for job in self._read(jobs):
                job.overtaken += overtaken[str(job.number)]
                if str(job.number) in chosen:
                    taken.append(job)
        for job in taken:
            jobs = self.jobs_of(job)
            (jobs.stream if job.start_by_ms is None else jobs.dated).remove(job)
            self.running[job.arrival.tenant] += 1
        if taken:
            self._overtaken.update(decision.overtakes.signatures)
            if decision.overtakes.had_turn is not None:
                del self._overtaken[kind.name, decision.overtakes.had_turn]
        return taken

    def ended(self, job: SimulatedJob, now_s: float) -> None:
        """Note that a running job has ended at `now_s`."""
        self.running[job.arrival.tenant] -= 1

    def expire(self, running: list[SimulatedJob], now_s: float) -> None:
        """Remove queued jobs, and those of a worker that are `running`, that end by their deadlines."""

    # Facts

    def facts(self, now_s: float, models: Collection[str], holders: Mapping[str, int]) -> QueueFacts:
        """Return what decides between the signatures of a worker's models; `holders` are other workers with a model."""
        by_order: dict[tuple[str, int], list[JobKind]] = {}
        for kind in self.kinds():
            if kind.model in models:
                for rank in {lane.rank for lane, _ in self.of_kind(kind)}:
                    by_order.setdefault((kind.model, rank), []).append(kind)
        orders = {
            (model, rank): self._order(kinds, rank, now_s, holders.get(model, 0))
            for (model, rank), kinds in by_order.items()
        }
        return QueueFacts(1000 * now_s, POLICIES, (), dict.fromkeys(models, 0.0), orders)

    def _order(self, kinds: list[JobKind], rank: int, now_s: float, holders: int) -> OrderFacts:
        ready = {kind: self._ready_ms(kind, rank, now_s) for kind in kinds}
        tenants: dict[str, list[SignatureFacts]] = {}
        work_ms = 0.0
        for kind in kinds:
            for lane, jobs in self.of_kind(kind):
                if lane.rank == rank:
                    overtaken = self._overtaken[kind.name, rank]
                    one = SignatureFacts(kind.name, ready[kind], jobs.start_by_ms, overtaken)
                    tenants.setdefault(lane.tenant, []).append(one)
                    work_ms += 1000 * len(jobs) * kind.image_s(kind.rows)
        by_readiness = sorted((at, kind.name) for kind, at in ready.items())
        return OrderFacts(
            True,
            [TenantFacts(name, 0.0, self._limit(name), signatures) for name, signatures in tenants.items()],
            [(name, at) for at, name in by_readiness],
            holders,
            work_ms,
        )

    def _limit(self, tenant: str) -> Limit:
        return Limit(self.limits.get(tenant, 0), self.running[tenant], False)

    def _ready_ms(self, kind: JobKind, rank: int, now_s: float) -> float:
        lanes = [jobs for lane, jobs in self.of_kind(kind) if lane.rank == rank]
        starts = [jobs.start_by_ms for jobs in lanes if jobs.start_by_ms is not None]
        start_by_ms = min(starts) - START_LEAD_MS if starts else None
        slots = sum(len(jobs) for _, jobs in self.of_kind(kind))
        oldest_s = min(jobs.oldest_s for jobs in lanes)
        return self._readiness.ready_ms(kind, now_s, oldest_s, slots, start_by_ms)

    def signature(self, kind: JobKind, now_s: float) -> SignatureQueue:
        """Return the queued jobs of a signature."""
        lanes = list(self.of_kind(kind))
        queued = [sum(len(jobs) for lane, jobs in lanes if lane.rank == rank) for rank in range(3)]
        return SignatureQueue(
            signature=kind.name,
            model=kind.model,
            now_ms=1000 * now_s,
            max_batch=MAX_BATCH,
            efficient_rows=kind.rows,
            jobs=queued,
            slots=queued,
            ready_ms=[self._ready_ms(kind, rank, now_s) if count else None for rank, count in enumerate(queued)],
            overtaken=[self._overtaken[kind.name, rank] for rank in range(3)],
            claimed_jobs=0,
            run_ms=self.run_ms(kind, now_s),
            lanes=[self._lane(lane, jobs) for lane, jobs in lanes],
            lost=(),
            has_more=False,
        )

    def run_ms(self, kind: JobKind, now_s: float) -> float:
        """Return the mean time of a job; 0 if it is not learned."""
        return 0.0

    def _lane(self, lane: Lane, jobs: LaneJobs) -> LaneFacts:
        rows = [
            QueuedJob(
                str(job.number),
                0,
                "lane" if job.start_by_ms is None else "dated",
                1,
                1000 * job.in_lane_s,
                job.start_by_ms,
                False,
                None,
                job.overtaken,
                lane.tenant,
                False,
            )
            for job in self._read(jobs)
        ]
        returned, stream = ([row for row in rows if row.place == place] for place in ("dated", "lane"))
        limit = self._limit(lane.tenant)
        return LaneFacts(lane.rank, lane.tenant, 0.0, limit, jobs.start_by_ms, returned, False, stream)

    def _read(self, jobs: LaneJobs) -> list[SimulatedJob]:
        """Return the jobs of a lane that a claim reads."""
        return [*jobs.dated[:MAX_BATCH], *(jobs.stream[at] for at in range(min(MAX_BATCH, len(jobs.stream))))]
