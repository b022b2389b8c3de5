"""What the order is decided from: what the scripts `read_order`, `read_lanes` and `read_places` return."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from shared.queue.order.policies import Limit, OrderPolicies, Reservation

TENANTS_READ = 8
"""Tenants of a model and priority that `read_order` returns."""

READY_READ = 8
"""Signatures of a model and priority on a page of those that have been ready longest."""

JOB_FIELDS = (
    *("state", "tenant", "entry", "deadline", "src", "epoch", "slots", "arrived", "returned", "start_by", "passed"),
    *("overtaken", "waiting_worker", "waited", "on_deadline", "steps", "left", "id", "loses_place"),
)
"""The row of a job from `read_lanes`: fields of its hash as texts, False where it has none, and two more."""

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


class QueueFacts(NamedTuple):
    """What decides between signatures. `credits` are bulk slots due by model, `preempted` the usage of the tenants that
    would be delayed; paused models are left out."""

    now_ms: float
    policies: OrderPolicies
    preempted: Sequence[float]
    credits: Mapping[str, float]
    orders: Mapping[tuple[str, int], OrderFacts]


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
    lost ones count together: far ones in a stream also if they were removed meanwhile. `spared` is work, in jobs, that
    the checkpoints of the job and of those before it spare.
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
    spared: float = 0.0


class UnfinishedJob(NamedTuple):
    """A job of which it is to be known when it ends, or that another such job waits for, and that may not have ended.

    `place`: of a queued job; of one that waits, that which it would have if it arrived now. One that waits is due after
    its `parents`, and not before `due_ms`; so many `siblings` have waited longer for one of these. `run_ms` is the mean
    time of a job of its signature, None if unknown; `left` the part of it that is left of a running job.
    """

    id: str
    state: Literal["queued", "waiting", "paused", "running", "ended"]
    model: str
    parents: Sequence[str] = ()
    place: PlaceFacts | None = None
    due_ms: int = 0
    siblings: int = 0
    run_ms: float | None = None
    left: float = 1.0


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
                [(sig, float(at)) for sig, at in zip(ready[::2], ready[1::2], strict=True)],
                holders,
                work,
            )
            for model, rank, has_tenants, tenants, ready, holders, work in wire["orders"] or ()
        },
    )


def _tenant(row: Sequence[Any]) -> TenantFacts:
    name, usage, limit, signatures = row
    return TenantFacts(name, usage, _limit(limit), [SignatureFacts(*one) for one in signatures or ()])


def signature_queue(signature: str, worker: str, text: str) -> SignatureQueue | None:
    """Return the facts of a reply of `read_lanes` to `worker`; None for a signature without jobs."""
    wire = json.loads(text)
    if not wire:
        return None
    model, max_batch, *counts = wire["state"]
    numbers = [max(0, int(count or 0)) for count in counts]
    return SignatureQueue(
        signature=signature,
        model=model,
        now_ms=wire["now"],
        max_batch=int(max_batch or 0) or None,
        efficient_rows=int(wire["efficient"] or 0) or None,
        jobs=numbers[:3],
        slots=numbers[3:6],
        ready_ms=[_number(at) for at in wire["ready"]],
        overtaken=numbers[6:],
        claimed_jobs=int(wire["claimed"] or 0),
        run_ms=wire["mean"],
        lanes=[_lane(row, worker, wire["now"]) for row in wire["lanes"] or ()],
        lost=[_lost(row, worker, wire["now"]) for row in wire["lost"] or ()],
        has_more=wire["more"],
    )


def _number(text: Literal[False] | str) -> float | None:
    return float(text) if text else None


def _job(row: Sequence[Any], worker: str, now_ms: int) -> QueuedJob:
    fields = dict(zip(JOB_FIELDS, row, strict=True))
    start_by, waited_ms = _number(fields["start_by"]), _number(fields["waited"])
    return QueuedJob(
        id=fields["id"],
        epoch=int(fields["epoch"] or 0),
        place=fields["src"],
        slots=int(fields["slots"]),
        since_ms=_since_ms(fields, now_ms),
        start_by=None if start_by is None else int(start_by),
        loses_place=fields["loses_place"],
        passed_ms=_number(fields["passed"]),
        overtaken=int(fields["overtaken"] or 0),
        tenant=fields["tenant"],
        has_worker=fields["waiting_worker"] != worker and waited_ms is not None and 0 <= now_ms - waited_ms < WAITED_MS,
    )


def _since_ms(fields: Mapping[str, Any], now_ms: int) -> float:
    if fields["src"] == "lane":
        return float(fields["entry"].partition("-")[0])
    since_ms = _number(fields["returned" if fields["src"] == "solo" else "arrived"])
    return now_ms if since_ms is None else since_ms


def _lost(row: Sequence[Any], worker: str, now_ms: int) -> LostJob:
    rank, tenant, usage, limit, job = row
    return LostJob(rank, tenant, usage, _limit(limit), _job(job, worker, now_ms))


def _limit(row: Sequence[Any]) -> Limit:
    most, used, paused, reserved = row
    return Limit(most, used, paused, Reservation(*reserved) if reserved else None)


def _lane(row: Sequence[Any], worker: str, now_ms: int) -> LaneFacts:
    rank, tenant, usage, limit, start_by, returned, more, stream = row
    first, rest = ([_job(one, worker, now_ms) for one in rows or ()] for rows in (returned, stream))
    return LaneFacts(rank, tenant, usage, _limit(limit), start_by, first, more, rest)


def place_facts(text: str) -> PlaceFacts | None:
    """Return the facts of a reply of `submit`; None of a job that is in no lane."""
    return _place(json.loads(text)) if text else None


def unfinished_jobs(text: str) -> list[UnfinishedJob]:
    """Return the facts of a reply of `read_places`."""
    return [_unfinished_job(row) for row in json.loads(text)]


def _unfinished_job(row: Mapping[str, Any]) -> UnfinishedJob:
    place = _place(row["place"]) if "place" in row else None
    return UnfinishedJob(**{**row, "parents": row["parents"].split(), "place": place})


def _place(wire: Mapping[str, Any]) -> PlaceFacts:
    return PlaceFacts(**{**wire, "limit": _limit(wire["limit"])})
