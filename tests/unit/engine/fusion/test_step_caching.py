"""Which steps are computed, and what the others are extrapolated to."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from shared.config.step_schedules import CONSERVATIVE, CacheLevel, StepSchedule, computed_steps, weights
from worker.engine.fusion.step_caching import MAX_BRANCHES, StepCache

THIRD = StepSchedule(every=3)


@pytest.mark.parametrize(
    ("steps", "schedule", "computed"),
    [
        (50, None, list(range(50))),
        (50, THIRD, [0, 1, 2, 3, *range(4, 47, 3), 47, 48, 49]),
        (16, THIRD, [0, 1, 2, 3, 4, 7, 10, 13, 14, 15]),
        (10, THIRD, [0, 1, 2, 3, 4, 7, 8, 9]),
        (9, THIRD, list(range(9))),
        (4, StepSchedule(every=2, first=1, last=1), list(range(4))),
        (12, StepSchedule(every=2, first=2, last=1), [0, 1, 2, 4, 6, 8, 10, 11]),
        (12, StepSchedule(every=2, first=20, last=1), list(range(12))),
        (12, StepSchedule(every=2, first=1, last=20), list(range(12))),
        (0, THIRD, []),
    ],
)
def test_the_computed_steps_follow_from_their_number(
    steps: int, schedule: StepSchedule | None, computed: list[int]
) -> None:
    assert list(computed_steps(steps, schedule)) == computed


def test_models_without_a_table_compute_31_29_and_22_of_50_steps() -> None:
    counts = {level: len(computed_steps(50, schedule)) for level, schedule in CONSERVATIVE.items()}
    assert counts == {CacheLevel.LIGHT: 31, CacheLevel.MEDIUM: 29, CacheLevel.STRONG: 22}


@pytest.mark.parametrize(
    "fields",
    [{"every": 1}, {"every": 9}, {"every": 3, "first": 0}, {"every": 3, "last": 0}, {"every": 3, "order": "cubic"}],
)
def test_a_schedule_computes_the_first_and_the_last_step(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        StepSchedule(**fields)


@pytest.mark.parametrize(
    ("known", "step", "expected"),
    [([4], 6, [1.0]), ([1, 4], 6, [-2 / 3, 5 / 3]), ([2, 3, 4], 5, [1.0, -3.0, 3.0]), ([0, 1], 3, [-2.0, 3.0])],
)
def test_the_weights_are_those_of_the_polynomial(known: list[int], step: int, expected: list[float]) -> None:
    assert weights(known, step) == pytest.approx(expected)


@dataclass
class Denoiser:
    """A denoiser that returns `value(s)` at step `s`, and the progress of its image."""

    cache: StepCache = field(init=False)
    schedule: StepSchedule = THIRD
    step: int = 0
    loop_start: int = 0
    loop_steps: int = 20
    computed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cache = StepCache(self.schedule, self)

    def call(self, value: float, sample: float = 0.0, method: str = "unet.forward", rows: int = 1) -> torch.Tensor:
        def compute(_call: Any) -> tuple[torch.Tensor]:
            self.computed.append(self.step - self.loop_start)
            return (torch.full((rows, 2), value),)

        call: Any = SimpleNamespace(
            shared_method=SimpleNamespace(name=method, stacker=None), args=(torch.full((rows, 2), sample),), kwargs={}
        )
        (output,) = self.cache.answer(call, compute)
        return output


@pytest.mark.parametrize(("order", "power"), [("reuse", 0), ("linear", 1), ("quadratic", 2)])
def test_outputs_that_follow_the_polynomial_are_exact(order: Any, power: int) -> None:
    denoiser = Denoiser(schedule=StepSchedule(every=3, order=order))
    for denoiser.step in range(20):
        output = denoiser.call(float(denoiser.step**power))
        assert output[0, 0].item() == pytest.approx(denoiser.step**power, rel=1e-5)
    assert denoiser.computed == list(computed_steps(20, THIRD))
    assert denoiser.cache.skipped == 20 - len(denoiser.computed)
    assert denoiser.cache.nbytes == 0, "nothing follows the last skipped step"


def test_a_residual_is_added_to_the_present_input() -> None:
    """Its input jumps, and what the denoiser adds to it is constant."""
    denoiser = Denoiser(schedule=StepSchedule(every=3, order="reuse", of="residual"))
    for denoiser.step in range(20):
        sample = float(denoiser.step**3)
        assert denoiser.call(sample + 5, sample)[0, 0].item() == sample + 5
    assert len(denoiser.computed) == 12


def test_the_calls_of_one_step_continue_their_own_earlier_calls() -> None:
    """Guidance by two calls, in either of two numbers of rows."""
    denoiser = Denoiser()
    for denoiser.step in range(20):
        outputs = [denoiser.call(float(sign * denoiser.step), rows=rows) for sign, rows in ((1, 1), (-1, 1), (9, 2))]
        assert [output[0, 0].item() / max(1, denoiser.step) for output in outputs] == pytest.approx(
            [1, -1, 9] if denoiser.step else [0, 0, 0], rel=1e-5
        )
    assert denoiser.computed == [step for step in computed_steps(20, THIRD) for _ in range(3)]
    assert denoiser.cache.skipped == 8, "steps, not calls"


def test_a_second_denoiser_computes_until_it_has_outputs_of_its_own() -> None:
    denoiser = Denoiser()
    for denoiser.step in range(20):
        method = "transformer.forward" if denoiser.step < 8 else "transformer_2.forward"
        base = 0 if denoiser.step < 8 else 100
        output = denoiser.call(float(base + denoiser.step), method=method)
        assert output[0, 0].item() == pytest.approx(base + denoiser.step)
    assert denoiser.computed == [0, 1, 2, 3, 4, 7, 8, 9, 10, 13, 16, 17, 18, 19]


def test_a_call_that_was_not_made_in_the_last_computed_step_is_computed() -> None:
    """Guidance for a part of the steps: an old output says nothing about the present."""
    denoiser = Denoiser()
    for denoiser.step in range(20):
        denoiser.call(1.0)
        if not 7 <= denoiser.step < 10:
            denoiser.call(2.0)
    assert denoiser.computed.count(10) == 2
    assert denoiser.computed.count(11) == 1, "the second call has one output again, and needs two"


def test_a_second_loop_over_steps_begins_again() -> None:
    """A prior and a decoder, or the stages of a pyramid."""
    denoiser = Denoiser(loop_steps=12)
    for denoiser.step in range(12):
        denoiser.call(1.0)
    denoiser.loop_start, denoiser.loop_steps = 12, 16
    for denoiser.step in range(12, 28):
        denoiser.call(3.0)
    assert denoiser.computed == [*computed_steps(12, THIRD), *computed_steps(16, THIRD)]


def test_kept_outputs_are_counted_and_bounded() -> None:
    """At most three for each of a few calls in a step; calls without a loop keep nothing."""
    denoiser = Denoiser(schedule=StepSchedule(every=3, order="quadratic"))
    for denoiser.step in range(10):
        for place in range(MAX_BRANCHES + 4):
            denoiser.call(float(place))
        assert denoiser.cache.nbytes <= MAX_BRANCHES * 3 * 2 * 4
    assert denoiser.cache.nbytes == MAX_BRANCHES * 3 * 2 * 4
    outside = Denoiser(loop_steps=0)
    for _ in range(10):
        outside.call(1.0)
    assert (outside.cache.nbytes, outside.cache.skipped) == (0, 0)


def test_an_answer_shares_no_memory_with_what_is_kept() -> None:
    """Pipelines change outputs in place, computed ones and answers alike."""
    denoiser = Denoiser(schedule=StepSchedule(every=3, order="reuse"))
    for denoiser.step in range(20):
        output = denoiser.call(1.0)
        assert output[0, 0].item() == 1.0
        output += 7
