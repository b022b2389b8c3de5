"""How long a running job still takes, by the times of its steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepTimes:
    """The first and the last report of a job's progress: steps of all its images, and when they were done."""

    first_step: int
    first_s: float
    last_step: int
    last_s: float
    total: int


def with_report(times: StepTimes | None, step: int, total: int, at_s: float) -> StepTimes:
    """Return the times after another report. A count that falls, or another total, starts anew."""
    if times is None or step < times.last_step or total != times.total:
        return StepTimes(step, at_s, step, at_s, total)
    return StepTimes(times.first_step, times.first_s, step, at_s, total)


def ran_s(times: StepTimes | None, now_s: float) -> float:
    """Return for how long the job has taken steps; 0 before the first one."""
    return 0.0 if times is None else now_s - times.first_s


def remaining_s(times: StepTimes | None, now_s: float) -> float:
    """Return how long the rest of the steps takes, at the pace so far; 0 if nothing is known of it.

    A step that has taken longer than others before counts as one of the slower ones.
    """
    if times is None:
        return 0.0
    done = times.last_step - times.first_step
    mean_s = (times.last_s - times.first_s) / done if done else 0.0
    step_s = max(mean_s, (now_s - times.first_s) / (done + 1))
    return max(0.0, (times.total - times.last_step) * step_s - (now_s - times.last_s))
