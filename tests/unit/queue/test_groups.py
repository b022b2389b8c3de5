"""The rate and the time left of a group."""

from __future__ import annotations

import pytest

from shared.queue.groups import STATES, Group

TABLE: tuple[tuple[str, dict[str, int], int, float, float | None, float, float | None], ...] = (
    ("at the rate of the last minutes", {"queued": 8, "running": 2}, 5, 300, None, 1, 600),
    ("not before its last job, which waits", {"queued": 8, "running": 2}, 5, 300, 3600, 1, 3600),
    ("and at its rate, if that takes longer", {"queued": 8, "running": 2}, 5, 300, 7, 1, 600),
    ("a new group: of the time since its beginning", {"queued": 8, "succeeded": 4}, 4, 60, 7, 4, 120),
    ("nothing has ended: what the queue expects", {"queued": 8}, 0, 300, 7, 0, 7),
    ("nothing is known", {"queued": 8}, 0, 300, None, 0, None),
    ("paused jobs do not end", {"paused": 8, "running": 1}, 1, 60, None, 1, 60),
    ("all have ended", {"succeeded": 8}, 8, 300, None, 1.6, None),
)


@pytest.mark.parametrize(
    ("jobs", "recent", "recent_s", "queue_eta_s", "rate", "eta_s"),
    [one[1:] for one in TABLE],
    ids=[one[0] for one in TABLE],
)
def test_the_rate_and_the_time_left(
    jobs: dict[str, int], recent: int, recent_s: float, queue_eta_s: float | None, rate: float, eta_s: float | None
) -> None:
    counts = {state: jobs.get(state, 0) for state in STATES}
    group = Group("nightly", counts, 0, 0, 0.0, recent, recent_s, queue_eta_s)
    assert (group.rate_per_minute, group.eta_s) == (pytest.approx(rate), eta_s)
