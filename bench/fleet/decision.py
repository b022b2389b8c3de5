"""The decisions of the product for a simulated fleet: what `GET /v1/scale` and `fusequeue pool` would do."""

from __future__ import annotations

from collections.abc import Iterator

from api.routes.operators.operations import fleet_of
from bench.fleet.fleet_state import BULK_WINDOW_S, TARGET_WAIT_S, FleetState, FleetWorker
from cli.pool.pool import PoolWorker
from shared.autoscaling import Backlog, DatedSlots, LimitedTenant, SignatureLoad, Targets, wanted_workers
from shared.queue import UnavailableModel, WorkerInfo


def wanted(state: FleetState) -> int:
    backlog = Backlog(list(_loads(state)), list(_limited(state)), list(_dated(state)))
    fleet = fleet_of([_info(state, worker) for worker in state.workers], state.start_s)
    return wanted_workers(backlog, fleet, Targets(TARGET_WAIT_S, BULK_WINDOW_S)).wanted


def pool_worker(state: FleetState, worker: FleetWorker) -> PoolWorker:
    bulk = sum(job.arrival.bulk for job in worker.running)
    return PoolWorker(
        worker.index, "ready" if worker.tried else "starting", worker.started_s, len(worker.running), bulk
    )


def _info(state: FleetState, worker: FleetWorker) -> WorkerInfo:
    served = tuple(kind.name for kind in state.served)
    ready = worker.loaded_s is not None
    failure = UnavailableModel("the hub cannot be reached", permanent=False, retry_in_s=1.0)
    return WorkerInfo(
        id=str(worker.index),
        models=served,
        state="ready" if ready else "unavailable" if worker.tried else "starting",
        unavailable={} if ready or not worker.tried else dict.fromkeys(served, failure),
        running_jobs=len(worker.running),
        bulk_jobs=sum(job.arrival.bulk for job in worker.running),
        ready_s=None if worker.loaded_s is None else state.now_s - worker.loaded_s,
    )


def _loads(state: FleetState) -> Iterator[SignatureLoad]:
    for kind, lanes in state.queue.by_kind.items():
        cost = state.costs[kind]
        urgent = [jobs for lane, jobs in lanes.items() if not lane.bulk]
        waiting = [jobs for lane, jobs in lanes.items() if not lane.bulk and not state.beyond_quota(lane.tenant)]
        bulk = [jobs for lane, jobs in lanes.items() if lane.bulk]
        yield SignatureLoad(
            signature=kind.name,
            model=kind.name,
            queued_slots=sum(map(len, urgent)),
            bulk_slots=sum(map(len, bulk)),
            running_slots=state.running(kind),
            oldest_wait_s=max((state.age_s(jobs) for jobs in lanes.values()), default=0.0),
            waiting_s=max(map(state.age_s, waiting), default=0.0),
            bulk_age_s=max(map(state.age_s, bulk), default=0.0),
            slot_s=cost.slot_s,
            rows=cost.rows,
            cost_curve=kind.curve if cost.slot_s is not None else None,
        )


def _limited(state: FleetState) -> Iterator[LimitedTenant]:
    for tenant, limit in state.queue.limits.items():
        if state.beyond_quota(tenant):
            slots: tuple[dict[str, float], dict[str, float]] = ({}, {})
            for lane, jobs in state.queue.lanes():
                if lane.tenant == tenant:
                    known = slots[lane.bulk]
                    known[lane.kind.name] = known.get(lane.kind.name, 0.0) + len(jobs)
            yield LimitedTenant(tenant, limit, state.queue.running[tenant], *slots)


def _dated(state: FleetState) -> Iterator[DatedSlots]:
    """Yield the bulk jobs that are due; those of a lane are due at the same time."""
    for lane, jobs in state.queue.lanes():
        due_s = jobs.stream[0].arrival.deadline_s
        if lane.bulk and due_s is not None:
            yield DatedSlots(lane.kind.name, lane.tenant, due_s - state.now_s, queued=len(jobs))
