"""Times of forwards, and of the engine's thread: idle time counts only while a job was queued."""

from __future__ import annotations

import itertools

import pytest
import torch

from worker.engine.engine_status import ThreadTime
from worker.engine.scheduling import timing
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


def test_a_job_that_waited_for_its_model_makes_the_thread_busy_without_idle_time() -> None:
    timer = ThreadTimer(0.0)
    timer.note_job(1.0, 1.0)
    timer.note_idle(2.0)  # the model loads
    timer.note_busy(8.0)
    timer.note_busy(9.0)
    assert timer.time(10.0) == ThreadTime(busy_s=3.0)


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


class GpuEvent:
    """An event of a GPU that does everything at once; the host needs a second between two events."""

    recorded = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        GpuEvent.recorded += 1
        self.at = GpuEvent.recorded

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: GpuEvent) -> float:
        return 1000.0 * (end.at - self.at)


@pytest.fixture(params=["cpu", "cuda"])
def timer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ForwardTimer:
    """A timer with a clock that advances by a second at each look."""
    monkeypatch.setattr(torch.cuda, "Event", GpuEvent)
    monkeypatch.setattr(timing.time, "perf_counter", itertools.count().__next__)
    return ForwardTimer(torch.device(request.param))


def ignored(seconds: float) -> None: ...


def test_own_code_before_a_first_forward_is_measured(timer: ForwardTimer) -> None:
    """Tokenizing, for example."""
    seconds: list[float] = []
    started = timer.begin_own_code()
    timer.end_own_code(started, seconds.append)
    timer.drain()
    assert seconds == [1]


def test_the_own_code_after_a_forward_is_learned(timer: ForwardTimer) -> None:
    """It lengthens the time from one forward to the next, not the forward."""
    seconds: list[float] = []
    own_code: list[float] = []
    timer.measure("kind", lambda: None, seconds.append)
    timer.note_parked("kind", own_code.append)
    timer.drain()
    assert (seconds, own_code) == ([1], [1])
    assert timer.own_code_s("kind") == 1
    assert timer.learned_s("kind") == 2
    assert timer.own_code_s("other") == 0


def test_busy_time_is_measured_without_gaps(timer: ForwardTimer) -> None:
    """Selecting calls before a forward, a forward that fails, and what is left at the end of a job count too."""
    parts: dict[str, list[float]] = {name: [] for name in ("forward", "before", "own code", "rest", "idle")}
    timer.begin_busy()
    for _ in range(3):
        timer.measure("kind", lambda: None, parts["forward"].append, parts["before"].append)
        timer.note_parked("kind", parts["own code"].append)
    with pytest.raises(RuntimeError):
        timer.measure("kind", lambda: (_ for _ in ()).throw(RuntimeError), ignored, parts["before"].append)
    timer.measure_rest(parts["rest"].append)
    timer.end_busy()
    timer.measure_rest(parts["idle"].append)
    timer.drain()
    assert parts["forward"] == [1, 1, 1]
    assert parts["idle"] == []
    assert sum(map(sum, parts.values())) == 3 * 3 + 2, "seconds from the begin to the end"


def test_own_code_without_a_forward_is_not_learned(timer: ForwardTimer) -> None:
    """Cached outputs, for example."""
    timer.measure("kind", lambda: None, lambda _seconds: None)
    timer.note_parked("kind", ignored)
    timer.note_parked("cached", ignored)
    timer.drain()
    assert timer.own_code_s("cached") == 0


def test_a_gpu_runs_at_most_one_forward_behind_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", GpuEvent)
    timer, seconds = ForwardTimer(torch.device("cuda")), []
    for count in (0, 0, 1, 2):
        timer.measure("kind", lambda: None, seconds.append)
        timer.note_parked("kind", ignored)
        assert len(seconds) == count
