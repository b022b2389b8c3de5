"""Where a queued job stands, and why it waits."""

from __future__ import annotations

from typing import Any

import pytest

from shared.queue.order.facts import PlaceFacts
from shared.queue.order.policies import Limit, Reservation
from shared.queue.order.position import QueueReason, expected_s, jobs_before, queue_position

NOW = 100_000
FREE = Limit(0, 0, paused=False)
KEPT_FOR_LARGE = Limit(4, 2, paused=False, reserved=Reservation("large", 1, 4))


def facts(**changes: Any) -> PlaceFacts:
    """Return the facts of the only job of its signature, which is ready."""
    rank = changes.get("rank", 1)
    alone: dict[str, Any] = {
        "id": "job",
        "place": "lane",
        "rank": 1,
        "slots": 1,
        "now_ms": NOW,
        "limit": FREE,
        "model_paused": False,
        "jobs": [int(one == rank) for one in range(3)],
        "running": 0,
        "ready_ms": NOW,
        "gap_ms": None,
        "lost": 0,
        "returned": 0,
        "in_stream": 1,
        "before": 0,
        "tenants": 1,
        "less_served": 0,
    }
    return PlaceFacts(**{**alone, **changes})


TURNS = {"jobs": [0, 40, 0], "in_stream": 10, "tenants": 3}
POSITIONS = [
    ("the only job", {}, 0),
    ("later in its lane", {"jobs": [0, 9, 0], "in_stream": 9, "before": 4}, 4),
    ("far ones count until they are known to be removed", {"jobs": [0, 50, 0], "in_stream": 50, "before": 70}, 49),
    ("more urgent jobs go first, less urgent ones later", {"jobs": [3, 1, 7]}, 3),
    ("bulk jobs go after all others", {"rank": 2, "jobs": [3, 4, 1]}, 7),
    ("lost jobs of its rank go first", {"jobs": [0, 3, 0], "lost": 2}, 2),
    (
        "then those of its lane that were returned or have a deadline",
        {"jobs": [0, 6, 0], "returned": 3, "in_stream": 3, "before": 1},
        4,
    ),
    (
        "a returned one goes before the stream",
        {"place": "front", "jobs": [0, 6, 0], "returned": 3, "in_stream": 3, "before": 1},
        1,
    ),
    (
        "one with a deadline, too",
        {"place": "dated", "jobs": [0, 6, 0], "returned": 3, "in_stream": 3, "before": 2},
        2,
    ),
    ("other tenants have as many turns as its own has before it", {**TURNS, "before": 4}, 4 + 2 * 4),
    ("and one more if they have used less", {**TURNS, "before": 4, "less_served": 1}, 4 + 2 * 4 + 1),
    ("but no more turns than they have jobs", {**TURNS, "jobs": [0, 13, 0], "before": 4}, 4 + 3),
    ("lost jobs are not counted twice", {**TURNS, "jobs": [0, 13, 0], "lost": 3, "before": 4}, 3 + 4),
    (
        "returned jobs have the turns of their tenant",
        {**TURNS, "place": "front", "returned": 2, "before": 1},
        1 + 2,
    ),
    (
        "a lost job goes before all of its rank",
        {"place": "solo", "jobs": [2, 30, 0], "lost": 3, "before": 1, "tenants": 5, "less_served": 4},
        2 + 1,
    ),
    ("counters that were lost", {"jobs": [0, 0, 0], "in_stream": 3, "before": 2, "tenants": 0}, 2),
]


@pytest.mark.parametrize(("why", "case", "position"), POSITIONS, ids=[row[0] for row in POSITIONS])
def test_the_position_of_a_job(why: str, case: dict[str, Any], position: int) -> None:
    assert jobs_before(facts(**case)) == position, why


REASONS = [
    ("nothing is before it", {}, QueueReason.NEXT),
    ("a job is before it", {"jobs": [1, 1, 0]}, QueueReason.JOBS_AHEAD),
    ("a lost job waits for a worker without jobs", {"place": "solo", "jobs": [1, 1, 0]}, QueueReason.IDLE_WORKER),
    ("its batch can grow", {"ready_ms": NOW + 1}, QueueReason.BATCH_MATES),
    ("its signature is in no index yet", {"ready_ms": None}, QueueReason.BATCH_MATES),
    ("its tenant has its slots", {"limit": Limit(4, 4, paused=False), "ready_ms": None}, QueueReason.TENANT_LIMIT),
    ("it needs more slots than are left", {"limit": Limit(4, 3, paused=False), "slots": 2}, QueueReason.TENANT_LIMIT),
    ("it is above the limit, and the first of its tenant", {"limit": Limit(4, 0, paused=False), "slots": 8}, "next"),
    ("slots are kept for another one", {"limit": KEPT_FOR_LARGE}, QueueReason.TENANT_LIMIT),
    ("they are kept for it", {"limit": KEPT_FOR_LARGE, "id": "large", "slots": 2}, QueueReason.NEXT),
    ("they are kept for a less urgent one", {"limit": KEPT_FOR_LARGE, "rank": 0}, QueueReason.NEXT),
    ("its tenant is paused", {"limit": Limit(0, 0, paused=True), "ready_ms": None}, QueueReason.PAUSED),
    ("its model is paused", {"model_paused": True, "limit": Limit(4, 4, paused=False)}, QueueReason.PAUSED),
]


@pytest.mark.parametrize(("why", "case", "reason"), REASONS, ids=[row[0] for row in REASONS])
def test_why_a_job_waits(why: str, case: dict[str, Any], reason: QueueReason) -> None:
    assert queue_position(facts(**case)).reason == reason, why


def test_the_estimate_counts_running_jobs_those_before_and_the_job() -> None:
    assert queue_position(facts(jobs=[2, 1, 0], running=3, gap_ms=500.5)).eta_s == expected_s(500.5, 6) == 3.003
    assert queue_position(facts()).eta_s is None, "no job has ended lately"


@pytest.mark.parametrize(
    ("spared", "jobs"),
    [(0.0, 6), (0.75, 5.25), (2.5, 3.5), (9.0, 3)],  # running jobs count whole
)
def test_the_estimate_counts_what_checkpoints_leave_of_queued_jobs(spared: float, jobs: float) -> None:
    assert queue_position(facts(jobs=[2, 1, 0], running=3, gap_ms=1000, spared=spared)).eta_s == jobs
