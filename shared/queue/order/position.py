"""Where a queued job stands among the jobs of its signature, and why it waits, in the order that claims follow."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from shared.queue.order.facts import PlaceFacts


class QueueReason(StrEnum):
    """Why a job is still queued. The first that applies, in this order."""

    PAUSED = "paused"  # by its client; or by an operator: its model, its tenant or everything
    WAITING = "waiting"  # it is for later, or for the end of others
    NO_WORKER = "no_worker"  # no worker that serves the model is alive
    WORKER_STARTING = "worker_starting"
    MODEL_UNAVAILABLE = "model_unavailable"  # the workers cannot load the model now, and try again
    WORKERS_DRAINING = "workers_draining"
    TENANT_LIMIT = "tenant_limit"  # the tenant's running slots are used up
    BATCH_MATES = "batch_mates"  # the window is not over
    MODEL_LOADING = "model_loading"  # no worker has the model in memory
    IDLE_WORKER = "idle_worker"  # a lost job runs solo, on a worker without other jobs
    JOBS_AHEAD = "jobs_ahead"  # of its signature
    NEXT = "next"  # it starts when a worker has room


@dataclass(frozen=True)
class QueuePosition:
    """Position of a queued job among its signature's jobs, 0 is next, None of one that waits; `eta_s` until its end,
    None if unknown.

    `reason` is why it waits, apart from its workers. The estimate holds while workers serve `models`: those of the job
    and of all queued ones that it waits for.
    """

    position: int | None
    eta_s: float | None
    reason: QueueReason = field(default=QueueReason.NEXT, compare=False)
    models: frozenset[str] = field(default=frozenset(), compare=False)


def queue_position(facts: PlaceFacts) -> QueuePosition:
    """Return the position of a job, with the time until its end at the signature's recent rate of completions."""
    before = jobs_before(facts)
    jobs = facts.running + before + 1 - min(facts.spared, before + 1)
    return QueuePosition(before, expected_s(facts.gap_ms, jobs), _reason(facts, before))


def jobs_before(facts: PlaceFacts) -> int:
    """Return how many jobs of its signature are expected to start before a job.

    Those of higher priorities do, then lost ones. Then tenants take turns: another one precedes the job as often as its
    own tenant does, and once more if it is less served. Which tenants have how many jobs is not read: all together have
    so many turns, if they have so many jobs.
    """
    above = sum(facts.jobs[: facts.rank])
    if facts.place == "solo":
        return above + facts.before
    ahead, in_lane = facts.before, facts.returned + facts.in_stream
    if facts.place == "lane":
        ahead = facts.returned + max(0, min(facts.before, facts.in_stream - 1))
    others = max(0, facts.jobs[facts.rank] - facts.lost - in_lane)
    turns = ahead * max(0, facts.tenants - 1) + facts.less_served
    return above + facts.lost + ahead + min(others, turns)


def expected_s(gap_ms: float | None, jobs: float) -> float | None:
    """Return the time until so many jobs of a signature have ended, one each `gap_ms`; None if that is unknown."""
    return None if gap_ms is None else math.ceil(gap_ms * jobs) / 1000


def _reason(facts: PlaceFacts, before: int) -> QueueReason:
    if facts.model_paused or facts.limit.paused:
        return QueueReason.PAUSED
    if facts.limit.holds_back(facts.id, facts.rank) or not facts.limit.allows(facts.slots):
        return QueueReason.TENANT_LIMIT
    if facts.ready_ms is None or facts.ready_ms > facts.now_ms:
        return QueueReason.BATCH_MATES
    if facts.place == "solo":
        return QueueReason.IDLE_WORKER
    return QueueReason.JOBS_AHEAD if before else QueueReason.NEXT
