"""What the order is decided from: what the scripts `read_order`, `read_lanes` and `read_place` return."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from shared.queue.order.policies import Limit, OrderPolicies, Reservation

TENANTS_READ = 8
"""Tenants of a model and priority that `read_order` returns."""

READY_READ = 8
"""Signatures of a model and priority on a page of those that have been ready longest."""


WAITED_MS = 30_000
"""How long a worker that keeps slots free for a job counts: it asks again sooner, as its pauses are shorter."""


class SignatureFacts(NamedTuple):
    """A signature with queued jobs of a tenant: when it is ready (ms), the least latest start of these jobs, and how
    often it was overtaken by signatures with deadlines."""

    signature: str
    ready_ms: float
    start_by: int | None
    overtaken: int


class TenantFacts(NamedTuple):
    """A tenant with queued jobs of a model and priority: its GPU usage (a logarithm, 0 for none) and its signatures."""

    name: str
    usage: float
    limit: Limit
    signatures: Sequence[SignatureFacts]


class OrderFacts(NamedTuple):
    """The queued jobs of a model and priority: whether some tenant may have free slots, the least-served tenants, the
    signatures by readiness (ms), how many other workers hold the model, and the work that waits for them (ms)."""

    has_tenants: bool
    tenants: Sequence[TenantFacts]
    ready: Sequence[tuple[str, float]]
    holders: int
    work_ms: float


class UrgentJob(NamedTuple):
    start_by: int
    signature: str
    model: str
    rank: int


class QueueFacts(NamedTuple):
    """What decides between signatures. `credits` are bulk slots due by model, `preempted` the usage of the tenants that
    would be delayed; paused models are left out."""

    now_ms: float
    policies: OrderPolicies
    preempted: Sequence[float]
    credits: Mapping[str, float]
    orders: Mapping[tuple[str, int], OrderFacts]
    urgent: Sequence[UrgentJob]


Place = Literal["lane", "front", "solo", "dated"]
"""Where a queued job is: in its lane's stream, or outside of it: returned, lost, or with a deadline."""


class QueuedJob(NamedTuple):
    """A queued job as it was read. `since_ms` is its arrival, `passed_ms` when it was first skipped.

    `loses_place`: its latest start has passed, or it cannot meet its deadline. `has_worker`: another worker keeps slots
    free for it.
    """

    id: str
    epoch: int
    place: Place
    slots: int
    since_ms: float
    start_by: int | None
    loses_place: bool
    passed_ms: float | None
    overtaken: int
    tenant: str
    has_worker: bool


class LaneFacts(NamedTuple):
    """The first queued jobs of a tenant and priority: those that were returned or have a deadline, and the stream."""

    rank: int
    tenant: str
    usage: float
    limit: Limit
    start_by: int | None
    returned: Sequence[QueuedJob]
    has_more_returned: bool
    stream: Sequence[QueuedJob]


class LostJob(NamedTuple):
    """A job that a worker lost; `job.since_ms` is when it was queued again."""

    rank: int
    tenant: str
    usage: float
    limit: Limit
    job: QueuedJob


class SignatureQueue(NamedTuple):
    """The queued jobs of a signature; by rank: `jobs`, `slots`, when they are ready, and how often jobs with a deadline
    of other signatures overtook them. `max_batch`, `efficient_rows`: None if unknown; `claimed_jobs`: of the worker
    that asks; `run_ms`: mean time of a job."""

    signature: str
    model: str
    now_ms: float
    max_batch: int | None
    efficient_rows: int | None
    jobs: Sequence[int]
    slots: Sequence[int]
    ready_ms: Sequence[float | None]
    overtaken: Sequence[int]
    claimed_jobs: int
    run_ms: float
    lanes: Sequence[LaneFacts]
    lost: Sequence[LostJob]
    has_more: bool


class PlaceFacts(NamedTuple):
    """A queued job, and what is queued before it and beside it.

    Of its signature: `jobs` by rank, how many are `running`, and the mean time between completions (`gap_ms`). Of its
    rank in it: when it is ready, `lost` jobs, `tenants` with jobs, and how many of these have used less. Of its lane:
    `returned` jobs with those that have a deadline, and jobs `in_stream`. `before` are those in its own place, where
    lost ones count together: far ones in a stream also if they were removed meanwhile.
    """

    id: str
    place: Place
    rank: int
    slots: int
    now_ms: float
    limit: Limit
    model_paused: bool
    jobs: Sequence[int]
    running: int
    ready_ms: float | None
    gap_ms: float | None
    lost: int
    returned: int
    in_stream: int
    before: int
    tenants: int
    less_served: int


def queue_facts(wire: Mapping[str, Any]) -> QueueFacts:
    """Return the facts of a reply of `read_order`."""
    return QueueFacts(
        wire["now"],
        OrderPolicies(*wire["policies"]),
        wire["preempted"] or (),
        dict(wire["models"] or ()),
        {
            (model, rank): OrderFacts(
                has_tenants,
                [_tenant(row) for row in tenants or ()],
                [(sig, at) for sig, at in ready or ()],
                holders,
                work,
            )
            for model, rank, has_tenants, tenants, ready, holders, work in wire["orders"] or ()
        },
        [UrgentJob(*row) for row in wire["urgent"] or ()],
    )


def _tenant(row: Sequence[Any]) -> TenantFacts:
    name, usage, limit, signatures = row
    return TenantFacts(name, usage, _limit(limit), [SignatureFacts(*one) for one in signatures or ()])


def signature_queue(signature: str, text: str) -> SignatureQueue | None:
    """Return the facts of a reply of `read_lanes`; None for a signature without jobs."""
    wire = json.loads(text)
    if not wire:
        return None
    by_rank = list(zip(*wire["queued"], strict=True))
    return SignatureQueue(
        signature=signature,
        model=wire["model"],
        now_ms=wire["now"],
        max_batch=wire["batch"] or None,
        efficient_rows=wire["efficient"] or None,
        jobs=by_rank[0],
        slots=by_rank[1],
        ready_ms=by_rank[2],
        overtaken=by_rank[3],
        claimed_jobs=wire["claimed"],
        run_ms=wire["mean"],
        lanes=[_lane(row, wire["now"]) for row in wire["lanes"] or ()],
        lost=[_lost(row, wire["now"]) for row in wire["lost"] or ()],
        has_more=wire["more"],
    )


def _job(row: Sequence[Any], now_ms: int) -> QueuedJob:
    waited_ms = row[-1]
    return QueuedJob(*row)._replace(has_worker=waited_ms is not None and 0 <= now_ms - waited_ms < WAITED_MS)


def _lost(row: Sequence[Any], now_ms: int) -> LostJob:
    rank, tenant, usage, limit, job = row
    return LostJob(rank, tenant, usage, _limit(limit), _job(job, now_ms))


def _limit(row: Sequence[Any]) -> Limit:
    most, used, paused, reserved = row
    return Limit(most, used, paused, Reservation(*reserved) if reserved else None)


def _lane(row: Sequence[Any], now_ms: int) -> LaneFacts:
    rank, tenant, usage, limit, start_by, returned, more, stream = row
    first, rest = ([_job(one, now_ms) for one in rows or ()] for rows in (returned, stream))
    return LaneFacts(rank, tenant, usage, _limit(limit), start_by, first, more, rest)


def place_facts(text: str) -> PlaceFacts | None:
    """Return the facts of a reply of `read_place`; None of a job that is not queued."""
    if not text:
        return None
    wire = json.loads(text)
    return PlaceFacts(**{**wire, "limit": _limit(wire["limit"])})
