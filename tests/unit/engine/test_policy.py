"""Who goes next, as a table."""

from __future__ import annotations

from typing import Any

import pytest

from worker.engine.scheduling.selection_policy import Waiting, aged, can_wait, company, next_group

ENCODE, DECODE, DENOISE = range(3)


def call(cohort: str = "a", urgency: int = 1, age: int = 0, stage: int = DENOISE, **more: Any) -> Waiting:
    return Waiting(cohort, urgency, age, stage, more.pop("fit", "fits"), **more)


@pytest.mark.parametrize(
    ("waiting", "limit", "chosen"),
    [
        pytest.param([call(age=2), call(age=1)], 8, [1, 0], id="all that fit, oldest first"),
        pytest.param([call(age=3), call(age=1), call(age=2)], 2, [1, 2], id="the youngest is set aside at the limit"),
        pytest.param([call(age=1), call(age=2, urgency=0)], 1, [1], id="an urgent one goes before an older one"),
        pytest.param([call("b", age=2), call("a", age=1)], 8, [1], id="the older cohort runs to its end"),
        pytest.param([call("a", age=1), call("b", age=2, urgency=0)], 8, [1], id="urgency chooses the cohort too"),
        pytest.param(
            [call("a", age=1), call("a", age=9, stage=ENCODE)], 8, [1], id="a newcomer catches up with its cohort first"
        ),
        pytest.param(
            [call("a", age=1), call("b", age=0, stage=DECODE), call("b", age=2)], 8, [1], id="a finished picture leaves"
        ),
        pytest.param(
            [call("a", age=1), call("b", age=2, stage=ENCODE)], 8, [0], id="another cohort's newcomer delays nobody"
        ),
        pytest.param(
            [call(age=2, fit="x"), call(age=1, fit="y"), call(age=3, fit="y")], 8, [1, 2], id="those who fit the oldest"
        ),
        pytest.param([call()], 0, [0], id="somebody always goes"),
        pytest.param(
            [call(age=1, place=3), call(age=2, place=3), call(age=3, place=0)], 8, [0, 2], id="one a place, the oldest"
        ),
        pytest.param(
            [call(age=0, stage=DECODE, patient=True), call(age=1)], 8, [1], id="a patient one lets the others go first"
        ),
        pytest.param(
            [call(age=0, stage=DECODE, patient=True), call(age=1), call(age=2, stage=DECODE)],
            8,
            [0, 2],
            id="it goes with one that is not patient",
        ),
        pytest.param([call(stage=DECODE, patient=True)], 8, [0], id="it waits for nobody where nobody is"),
    ],
)
def test_next_group(waiting: list[Waiting], limit: int, chosen: list[int]) -> None:
    """Order by priority, then age; one cohort at a time; in it the earliest stage first."""
    assert next_group(waiting, lambda _fitting, _own: limit) == chosen


@pytest.mark.parametrize(
    ("waiting", "asked"),
    [
        pytest.param([call("b", age=2), call("a", age=1)], ([1], 1), id="those of one cohort"),
        pytest.param([call(urgency=2), call(age=1, urgency=2)], ([0, 1], 2), id="bulk calls among themselves"),
        pytest.param([call(urgency=2), call(age=1)], ([1, 0], 2), id="beside standard ones they do not yield"),
        pytest.param([call(urgency=2), call(age=1, urgency=0), call(age=2)], ([1, 2, 0], 2), id="to interactive ones"),
    ],
)
def test_the_limit_is_asked_for_those_that_fit(waiting: list[Waiting], asked: tuple[list[int], int]) -> None:
    """In order of rank, with the number of those that do not yield: limits differ by model and shape."""
    seen: list[tuple[list[int], int]] = []
    next_group(waiting, lambda fitting, own: seen.append((list(fitting), own)) or 8)  # type: ignore[func-returns-value]
    assert seen == [asked]


@pytest.mark.parametrize("stage", [ENCODE, DECODE])
def test_the_stage_of_a_bulk_call_keeps_no_interactive_one_waiting(stage: int) -> None:
    """A bulk newcomer, or a bulk picture that is done, catches up when nobody waits who is in a hurry."""
    bulk, interactive, standard = call(urgency=2, stage=stage), call(age=1, urgency=0), call(age=2)
    assert next_group([bulk, interactive], lambda fitting, _own: len(fitting)) == [1]
    assert next_group([bulk, standard], lambda fitting, _own: len(fitting)) == [0]


@pytest.mark.parametrize(
    ("urgency", "calls", "wait_s", "saved_s", "in_line", "waits"),
    [
        pytest.param(1, 1, 0.2, 0.1, 8, True, id="0.2 s of one picture for 0.1 s of each of 8, and of 8 more"),
        pytest.param(2, 1, 0.2, 0.1, 8, True, id="a bulk job too"),
        pytest.param(0, 1, 0.2, 0.1, 8, False, id="an interactive one not"),
        pytest.param(1, 7, 0.2, 0.1, 8, True, id="7 pictures still"),
        pytest.param(1, 9, 0.2, 0.1, 8, False, id="9 lose more"),
        pytest.param(1, 47, 0.2, 0.1, 24, True, id="47 for 24 in line and 72 more: three batches are a load of 3/4"),
        pytest.param(1, 49, 0.2, 0.1, 24, False, id="49 lose more than these gain"),
        pytest.param(1, 1, 0.2, 0.1, 1, False, id="nobody else in line"),
        pytest.param(1, 1, 1.7, 0.1, 8, False, id="a long forward, or many of them"),
        pytest.param(1, 1, 0.2, 0.0, 8, False, id="two take as long as one and one"),
        pytest.param(1, 1, 0.2, -0.1, 8, False, id="or longer"),
        pytest.param(1, 1, 0.0, 0.1, 0, False, id="no forward has been measured yet"),
    ],
)
def test_can_wait(urgency: int, calls: int, wait_s: float, saved_s: float, in_line: float, waits: bool) -> None:
    """Whether finished pictures wait for company in their decoding: what they lose by it against what all gain."""
    assert can_wait(urgency, calls, wait_s, saved_s, in_line, rows=8) is waits


FLAT_TO_FOUR = {1: 1.0, 2: 1.01, 3: 1.01, 4: 1.04, 5: 1.3, 6: 1.5, 8: 1.9}


@pytest.mark.parametrize(
    ("own", "others", "seconds", "taken", "why"),
    [
        (1, 7, {}, 0, "what it takes without company is seen first"),
        (1, 7, {8: 1.0}, 0, "whatever else is known"),
        (1, 7, {1: 1.0}, 1, "then one is tried"),
        (1, 7, {1: 1.0, 2: 1.3}, 0, "which is not free on a processor that one row fills"),
        (1, 7, {1: 1.0, 2: 1.01}, 3, "what costs nothing is doubled"),
        (1, 7, FLAT_TO_FOUR, 3, "up to where it begins to cost"),
        (1, 2, FLAT_TO_FOUR, 2, "never more than there are"),
        (3, 5, FLAT_TO_FOUR, 1, "with more of its own there is less room"),
        (4, 4, FLAT_TO_FOUR, 0, "and at last none"),
        (1, 0, {1: 1.0}, 0, "nobody is there"),
        (1, 7, {1: 1.0, 2: 1.05, 4: 1.05, 8: 1.05}, 7, "a step in all where it has twenty"),
    ],
)
def test_bulk_calls_keep_an_interactive_one_company_where_that_costs_nothing(
    own: int, others: int, seconds: dict[int, float], taken: int, why: str
) -> None:
    assert company(own, others, seconds.get) == taken, why


@pytest.mark.parametrize(
    ("urgency", "aside_s", "effective", "why"),
    [
        (2, 0.0, 2, "a bulk job that was not kept waiting is one"),
        (2, 29.9, 2, "patience is not at its end"),
        (2, 30.0, 1, "one patience lifts it to the standard jobs"),
        (2, 60.0, 0, "two lift it to the interactive ones, of which it is the oldest: it goes on to its end"),
        (2, 1e6, 0, "there is nothing above them"),
        (1, 30.0, 0, "a standard job has one step to go"),
        (0, 1e6, 0, "an interactive one has none"),
    ],
)
def test_who_is_set_aside_for_long_becomes_more_urgent(urgency: int, aside_s: float, effective: int, why: str) -> None:
    """A stream of interactive jobs cannot keep a bulk row waiting for ever."""
    assert aged(urgency, aside_s, patience_s=30.0) == effective, why
