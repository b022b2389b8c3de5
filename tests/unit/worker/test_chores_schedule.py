"""When periodic chores come up, and under which ids."""

from __future__ import annotations

import subprocess
import sys

import pytest

from worker.chores.batches import ADVANCE_DUE
from worker.chores.maintenance import MOVE_ON, RECONCILE, SWEEP
from worker.chores.schedule import due_chores
from worker.chores.webhooks import DELIVER


def test_a_start_brings_every_chore_once_under_an_id_of_its_own() -> None:
    """A worker that replaces a killed one does not wait for the next period, nor find its ids taken."""
    first, second = due_chores(630.0, None, "aaaa"), due_chores(630.0, None, "bbbb")
    assert [turn.chore for turn in first] == [SWEEP, MOVE_ON, RECONCILE, DELIVER, ADVANCE_DUE]
    assert not {turn.chore_id for turn in first} & {turn.chore_id for turn in second}


@pytest.mark.parametrize(
    ("last_s", "now_s", "ids"),
    [
        (600.0, 601.0, []),
        (609.5, 610.5, ["move-on-61", "webhooks-305", "batches-305"]),
        (659.9, 660.0, ["sweep-11-0", "move-on-66", "webhooks-330", "batches-330"]),
        (
            600.0,
            1234.0,
            ["sweep-20-0", "move-on-123", "reconcile-2", "webhooks-617", "batches-617"],
        ),  # a stopped clock or a lost Redis: once, and not once a period
        (660.0, 600.0, []),  # a clock set back
    ],
)
def test_a_period_comes_up_once_under_the_same_id_everywhere(last_s: float, now_s: float, ids: list[str]) -> None:
    """The id is made of the period alone, so that of several workers one gets it in."""
    assert [turn.chore_id for turn in due_chores(now_s, last_s, "aaaa")] == ids


def test_a_sweeps_pieces_end_with_its_period() -> None:
    """The chain of one period's pieces does not run beside the next one's."""
    (sweep,) = (turn for turn in due_chores(660.0, 659.0, "aaaa") if turn.chore == SWEEP)
    assert sweep.args == ("sweep-11", 0, 720.0)
    assert sweep.start_within_s == 60


def test_chores_need_no_torch() -> None:
    """The chores run where only the API's dependencies are installed."""
    code = "import sys, worker.chores.__main__; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.strip() == "[]"
