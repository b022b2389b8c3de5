"""Times of forwards, and of the engine's thread: idle time counts only while a job was queued."""

from __future__ import annotations

import pytest
import torch

from worker.engine.protocol import ThreadTime
from worker.engine.scheduling.timing import LEARNING_RATE, ForwardTimer, ThreadTimer


@pytest.mark.parametrize(
    ("queued_since_s", "idle_s"),
    [
        (12.0, 0.0),  # it arrived as the thread took it: no job was queued
        (11.5, 0.5),
        (10.0, 2.0),
        (3.0, 2.0),  # the thread was busy for a part of the time that the job was queued
    ],
)
def test_idle_time_counts_while_a_job_was_queued(queued_since_s: float, idle_s: float) -> None:
    timer = ThreadTimer(0.0)
    timer.note_job(0.0, 0.0)
    timer.note_idle(10.0)
    timer.note_job(12.0, queued_since_s)
    assert timer.time(15.0) == ThreadTime(busy_s=13.0, idle_while_queued_s=idle_s)


def test_a_job_that_arrives_at_a_busy_thread_adds_no_idle_time() -> None:
    timer = ThreadTimer(0.0)
    timer.note_job(1.0, 1.0)
    timer.note_job(5.0, 0.0)
    assert timer.time(6.0) == ThreadTime(busy_s=5.0)


def test_time_without_jobs_is_not_counted() -> None:
    timer = ThreadTimer(0.0)
    timer.note_idle(5.0)
    assert timer.time(9.0) == ThreadTime()


def test_the_time_of_a_forward_is_learned_by_kind() -> None:
    timer, seconds = ForwardTimer(torch.device("cpu")), []
    assert timer.measure("kind", lambda: "output", seconds.append) == "output"
    assert timer.learned_s("kind") == seconds[0]
    assert timer.learned_s("other") is None
    timer.measure("kind", lambda: None, seconds.append)
    assert timer.learned_s("kind") == pytest.approx(seconds[0] + LEARNING_RATE * (seconds[1] - seconds[0]))


def test_a_forward_that_fails_is_not_learned() -> None:
    timer = ForwardTimer(torch.device("cpu"))
    with pytest.raises(RuntimeError, match="injected"):
        timer.measure("kind", lambda: (_ for _ in ()).throw(RuntimeError("injected")), lambda _s: None)
    assert timer.learned_s("kind") is None
