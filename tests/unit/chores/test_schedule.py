"""Due times and ids of periodic chores."""

from __future__ import annotations

import subprocess
import sys

import pytest

from worker.chores.rq_queue import ADVANCE_DUE, DELIVER, MOVE_ON, RECONCILE, SWEEP, due_chores


def test_a_start_runs_every_chore_once_with_a_unique_id() -> None:
    """The successor of a killed worker does not wait for the next period, and its ids are free."""
    first, second = due_chores(630.0, None, "aaaa"), due_chores(630.0, None, "bbbb")
    assert [item.chore for item in first] == [SWEEP, MOVE_ON, RECONCILE, DELIVER, ADVANCE_DUE]
    assert not {item.chore_id for item in first} & {item.chore_id for item in second}


@pytest.mark.parametrize(
    ("last_s", "now_s", "ids"),
    [
        (600.0, 601.0, []),
        (609.5, 610.5, ["move-on-61", "webhooks-305", "batches-305"]),
        (659.9, 660.0, ["sweep-11-0", "move-on-66", "webhooks-330", "batches-330"]),
        (
            600.0,
            1234.0,
            ["sweep-20-0", "move-on-123", "reconcile-2-0", "webhooks-617", "batches-617"],
        ),  # after a pause: once, not once per period
        (660.0, 600.0, []),  # a clock set back
    ],
)
def test_a_period_has_one_id_in_all_workers(last_s: float, now_s: float, ids: list[str]) -> None:
    """Only one of several workers can enqueue the id of a period."""
    assert [item.chore_id for item in due_chores(now_s, last_s, "aaaa")] == ids


def test_the_chunks_of_a_chain_end_with_its_period() -> None:
    """The chain of chunks does not overlap the next period's."""
    sweep, reconcile = (item for item in due_chores(660.0, 599.0, "aaaa") if item.chore in (SWEEP, RECONCILE))
    assert sweep.args == ("sweep-11", 0, 720.0)
    assert sweep.start_within_s == 60
    assert reconcile.args == ("reconcile-1", 0, 1260.0)


def test_chores_do_not_import_torch() -> None:
    """The chores run with the API's dependencies only."""
    code = "import sys, worker.chores.__main__; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"
