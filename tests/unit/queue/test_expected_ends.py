"""When queued jobs are expected to end, with those that they wait for."""

from __future__ import annotations

from typing import Any

import pytest

from shared.queue.order.expected_ends import queue_positions
from shared.queue.order.facts import PlaceFacts, UnfinishedJob
from shared.queue.order.policies import Limit
from shared.queue.order.position import QueuePosition, QueueReason

NOW = 100_000


def place(queued: int = 0, *, gap_ms: float | None = 1000) -> PlaceFacts:
    """Return the place of a job after so many others of its lane."""
    return PlaceFacts(
        id="job",
        place="lane",
        rank=1,
        slots=1,
        now_ms=NOW,
        limit=Limit(0, 0, paused=False),
        model_paused=False,
        jobs=[0, queued + 1, 0],
        running=0,
        ready_ms=NOW,
        gap_ms=gap_ms,
        lost=0,
        returned=0,
        in_stream=queued + 1,
        before=queued,
        tenants=1,
        less_served=0,
    )


def running(name: str, run_ms: float | None = 8000, left: float = 1.0) -> UnfinishedJob:
    return UnfinishedJob(name, "running", "demo", run_ms=run_ms, left=left)


def queued(name: str, before: int = 0, gap_ms: float | None = 1000) -> UnfinishedJob:
    return UnfinishedJob(name, "queued", "demo", place=place(before, gap_ms=gap_ms))


def waiting(name: str, *parents: str, before: int = 0, **facts: Any) -> UnfinishedJob:
    """Return a job that takes four seconds."""
    known = {"due_ms": NOW, "run_ms": 4000, "place": place(before), **facts}
    return UnfinishedJob(name, "waiting", "demo", parents, **known)


ESTIMATES: list[tuple[str, list[UnfinishedJob], float | None]] = [
    ("after what is left of a running one", [running("a", left=0.25), waiting("job", "a")], 2 + 4),
    ("after a queued one", [queued("a", 6), waiting("job", "a")], 7 + 4),
    ("one that has just ended is over", [UnfinishedJob("a", "ended", ""), waiting("job", "a")], 4),
    ("after the last of several", [running("a"), queued("b"), queued("c", 2), waiting("job", "a", "b", "c")], 8 + 4),
    ("a chain", [running("a"), waiting("b", "a"), waiting("c", "b"), waiting("job", "c")], 8 + 3 * 4),
    ("by the longest way", [running("a"), waiting("b", "a"), waiting("job", "a", "b")], 8 + 4 + 4),
    ("one for later, not before its time", [waiting("job", due_ms=NOW + 60_000)], 60 + 4),
    ("one whose time has come is queued now", [waiting("job", due_ms=NOW - 60_000)], 4),
    ("its time, if its parent ends before", [running("a"), waiting("job", "a", due_ms=NOW + 9000)], 9 + 4),
    ("its parent, if that is for later", [waiting("a", due_ms=NOW + 9000), waiting("job", "a")], 9 + 4 + 4),
    ("after the jobs that are queued, if these take longer", [running("a"), waiting("job", "a", before=30)], 30 + 4),
    ("with those that wait for the same parent", [running("a"), waiting("job", "a", siblings=20)], 8 + 20 + 4),
    ("a paused parent", [UnfinishedJob("a", "paused", "demo"), running("b"), waiting("job", "a", "b")], None),
    ("a parent of which no job has ended", [queued("a", gap_ms=None), waiting("job", "a")], None),
    ("a running one of which no job has ended", [running("a", run_ms=None), waiting("job", "a")], None),
    ("a parent that is too far to be read", [running("a"), waiting("job", "a", "far")], None),
    ("it is unknown how long it takes", [running("a"), waiting("job", "a", run_ms=None)], None),
    (
        "it is unknown how long the jobs before it take",
        [running("a"), waiting("job", "a", siblings=1, place=place(gap_ms=None))],
        None,
    ),
    ("a parent of the parent is unknown", [waiting("a", "far"), waiting("job", "a")], None),
]


@pytest.mark.parametrize(("jobs", "eta_s"), [row[1:] for row in ESTIMATES], ids=[row[0] for row in ESTIMATES])
def test_the_estimate_of_a_job_that_waits(jobs: list[UnfinishedJob], eta_s: float | None) -> None:
    found = queue_positions(reversed(jobs))["job"]
    assert (found, found.reason) == (QueuePosition(None, eta_s), QueueReason.WAITING)


def test_queued_jobs_have_their_position_and_no_other_job_has_one() -> None:
    jobs = [queued("a", 3), running("b"), UnfinishedJob("c", "paused", "demo"), UnfinishedJob("d", "ended", "")]
    assert queue_positions(jobs) == {"a": QueuePosition(3, 4.0)}


def test_the_estimate_depends_on_the_models_of_all_that_are_queued_before_it() -> None:
    first = running("a")._replace(model="a")
    second, third = (waiting(name, parent)._replace(model=name) for name, parent in (("b", "a"), ("c", "b")))
    positions = queue_positions([first, second, third])
    assert [positions[name].models for name in "bc"] == [{"b"}, {"b", "c"}]
