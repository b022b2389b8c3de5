"""Due times and ids of periodic chores."""

from __future__ import annotations

import pytest

from api.chores.rq_queue import DELIVER, MOVE_ON, RECONCILE, SWEEP, ChoreQueue
from api.chores.schedule import ScheduledChore, due_chores
from api.protocols.openai.chore_part import ADVANCE


def due(now_s: float, last_s: float | None, token: str) -> list[ScheduledChore]:
    """Return the due chores of all queues."""
    return [item for kind in ChoreQueue for item in due_chores(kind, now_s, last_s, token)]


def test_a_start_runs_every_chore_once_with_a_unique_id() -> None:
    """The successor of a killed worker does not wait for the next period, and its ids are free."""
    first, second = due(630.0, None, "aaaa"), due(630.0, None, "bbbb")
    assert [item.chore for item in first] == [DELIVER, ADVANCE.function, SWEEP, MOVE_ON, RECONCILE]
    assert not {item.chore_id for item in first} & {item.chore_id for item in second}


@pytest.mark.parametrize(
    ("last_s", "now_s", "ids"),
    [
        (600.0, 601.0, []),
        (609.5, 610.5, ["deliver-305", "advance-305", "move-on-61"]),
        (659.9, 660.0, ["deliver-330", "advance-330", "sweep-11-0", "move-on-66"]),
        (
            600.0,
            1234.0,
            ["deliver-617", "advance-617", "sweep-20-0", "move-on-123", "reconcile-2-0"],
        ),  # after a pause: once, not once per period
        (660.0, 600.0, []),  # a clock set back
    ],
)
def test_a_period_has_one_id_in_all_workers(last_s: float, now_s: float, ids: list[str]) -> None:
    """Only one of several workers can enqueue the id of a period."""
    assert [item.chore_id for item in due(now_s, last_s, "aaaa")] == ids


def test_the_chunks_of_a_chain_end_with_its_period() -> None:
    """The chain of chunks does not overlap the next period's."""
    sweep, reconcile = due_chores(ChoreQueue.UPKEEP, 660.0, 599.0, "aaaa")[::2]
    assert sweep.args == ("sweep-11", 0, 720.0)
    assert sweep.start_within_s == 60
    assert reconcile.args == ("reconcile-1", 0, 1260.0)
