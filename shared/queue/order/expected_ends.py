"""When queued jobs are expected to end, also those that are for later or wait for others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from graphlib import TopologicalSorter
from typing import NamedTuple

from shared.queue.order.facts import PlaceFacts, UnfinishedJob
from shared.queue.order.position import QueuePosition, QueueReason, expected_s, jobs_before, queue_position


class _End(NamedTuple):
    """The time until a job ends, infinity if that is unknown, while workers serve `models`."""

    after_s: float
    models: frozenset[str] = frozenset()


def queue_positions(jobs: Iterable[UnfinishedJob]) -> dict[str, QueuePosition]:
    """Return the positions of those of the jobs that are queued and not paused. A job that waits has no estimate if one
    that it waits for has none or is not among them."""
    known = {one.id: one for one in jobs}
    ends: dict[str, _End] = {}
    positions: dict[str, QueuePosition] = {}
    for job_id in TopologicalSorter({one.id: one.parents for one in known.values()}).static_order():
        job = known.get(job_id)
        if job is None:
            ends[job_id] = _End(math.inf)
        elif job.place is None:
            ends[job_id] = _End(_unqueued_s(job))
        else:
            position = positions[job_id] = _position(job, job.place, [ends[one] for one in job.parents])
            ends[job_id] = _End(math.inf if position.eta_s is None else position.eta_s, position.models)
    return positions


def _unqueued_s(job: UnfinishedJob) -> float:
    """Return the time until a job ends that runs, is paused, or has ended."""
    if job.state == "ended":
        return 0.0
    return math.inf if job.run_ms is None else job.run_ms * job.left / 1000


def _position(job: UnfinishedJob, place: PlaceFacts, parents: Sequence[_End]) -> QueuePosition:
    models = frozenset({job.model}).union(*(one.models for one in parents))
    if job.state == "queued":
        return replace(queue_position(place), models=models)
    end_s = _waiting_s(job, place, [one.after_s for one in parents])
    return QueuePosition(None, None if math.isinf(end_s) else round(end_s, 3), QueueReason.WAITING, models)


def _waiting_s(job: UnfinishedJob, place: PlaceFacts, parents: Sequence[float]) -> float:
    """Return the time until a job ends that waits. It starts when it is due, and after its parents and the jobs that
    have waited longer for them; or after the jobs that are queued now, if these take longer."""
    due_s = max(0.0, job.due_ms - place.now_ms) / 1000
    siblings_s, queue_s = _delay_s(place, job.siblings), _delay_s(place, jobs_before(place))
    start_s = max(due_s, queue_s, *(parent_s + siblings_s for parent_s in parents))
    return start_s + (math.inf if job.run_ms is None else job.run_ms / 1000)


def _delay_s(place: PlaceFacts, jobs: int) -> float:
    """Return how long so many jobs of its signature delay a job."""
    delay_s = expected_s(place.gap_ms, jobs) if jobs else 0.0
    return math.inf if delay_s is None else delay_s
