"""How the engine's thread has spent its time: idleness counts only where a job stood in line meanwhile."""

import pytest

from worker.engine.scheduling.thread_time import ThreadTimer


@pytest.mark.parametrize(
    ("queued_since_s", "idle_s"),
    [
        (12.0, 0.0),  # it came as the thread took it: nothing waited
        (11.5, 0.5),
        (10.0, 2.0),
        (3.0, 2.0),  # it waited before the thread was idle, too: that was no idleness
    ],
)
def test_idleness_counts_from_when_a_job_waited(queued_since_s: float, idle_s: float) -> None:
    day = ThreadTimer(0.0)
    day.work(0.0, 0.0)
    day.rest(10.0)
    day.work(12.0, queued_since_s)
    assert day.idle_while_queued_s == idle_s
    assert day.busy_s(15.0) == 13.0


def test_a_job_that_comes_to_a_busy_thread_changes_nothing() -> None:
    day = ThreadTimer(0.0)
    day.work(1.0, 1.0)
    day.work(5.0, 0.0)
    assert day.idle_while_queued_s == 0.0
    assert day.busy_s(6.0) == 5.0


def test_without_work_time_passes_uncounted() -> None:
    day = ThreadTimer(0.0)
    day.rest(5.0)
    assert (day.busy_s(9.0), day.idle_while_queued_s) == (0.0, 0.0)
