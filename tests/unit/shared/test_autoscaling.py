"""How many workers are wanted, by what waits and what it costs."""

from __future__ import annotations

import pytest

from shared.autoscaling import UNKNOWN_SEAT_S, Fleet, Line, seat_seconds, wanted_workers

CURVE = {1: 1.0, 2: 1.1, 4: 1.4, 8: 2.4}  # seconds a forward; a row of eight costs 0.3 of a lone one


def line(waiting: int = 0, running: int = 0, oldest_s: float = 0.0, **more: object) -> Line:
    told = {"seat_s": 10.0, "rows": 1.0, **more}
    return Line(f"demo:64x64x1:{waiting}-{running}", waiting, running, oldest_s, **told)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("waiting", "rows", "curve", "expected"),
    [
        (8, 1.0, CURVE, 3.0),  # measured alone, but eight wait: they will share
        (2, 1.0, CURVE, 5.5),  # two wait: no fuller than that
        (1, 1.0, CURVE, 10.0),  # a lone one gains nothing
        (8, 8.0, CURVE, 10.0),  # measured in full company already
        (100, 4.0, CURVE, 10 * 0.3 / 0.35),  # in part
        (8, 1.0, None, 10.0),  # nothing is known of more rows
        (8, 1.0, {1: 1.0, 2: 2.4}, 10.0),  # a shape that gains nothing by company
        (8, 2.0, {1: 1.0, 2: 2.4}, 10 * 1.0 / 1.2),  # or loses
    ],
)
def test_a_seat_costs_what_it_will_cost_in_company(
    waiting: int, rows: float, curve: dict[int, float] | None, expected: float
) -> None:
    assert seat_seconds(line(waiting, rows=rows, curve=curve)) == pytest.approx(expected)


def test_a_model_that_nobody_has_run_yet_is_guessed() -> None:
    assert seat_seconds(line(3, seat_s=None)) == UNKNOWN_SEAT_S


@pytest.mark.parametrize(
    ("lines", "fleet", "expected", "reason"),
    [
        ([], Fleet(0, 0), 0, "nothing waits"),  # to zero
        ([line(1)], Fleet(0, 0), 1, "10.0 s wait"),  # the first job wakes one
        ([line(1, seat_s=0.0)], Fleet(0, 0), 1, "at least 1"),  # however cheap it is
        ([line(1, seat_s=None)], Fleet(0, 0), 1, "no job has ended yet"),
        ([line(9)], Fleet(1, 1), 3, "90.0 s wait"),  # 90 s of work, 30 aimed at
        ([line(9, curve=CURVE)], Fleet(1, 1), 1, "27.0 s wait"),  # which fused is 27 s
        ([line(running=6)], Fleet(1, 1), 1, "30.0 s run"),  # half of what runs is left
        ([line(3), line(6)], Fleet(0, 0), 3, ""),  # signatures add up
        ([line(1, oldest_s=90)], Fleet(2, 0), 3, "has waited 90 s"),  # the estimate was wrong
        ([line(1, oldest_s=90)], Fleet(2, 0, starting=1), 1, ""),  # or is not put right yet
        ([line(1, oldest_s=90)], Fleet(2, 0, settled_s=5.0), 1, ""),  # nor has it waited long for those that serve now
        ([line(1, oldest_s=90)], Fleet(2, 0, settled_s=61.0), 3, "has waited 90 s"),
        ([line(6, seat_s=60.0)], Fleet(0, 0), 4, ""),  # the last ones start, not end, within the target: 30 of 90 s
        ([line(1, seat_s=600.0)], Fleet(0, 0), 1, ""),  # however long it takes, two cannot share one seat
        ([line(8, seat_s=60.0, rows=8.0)], Fleet(0, 0), 1, ""),  # one batch: all start at once
        ([line(16, seat_s=60.0, rows=8.0)], Fleet(0, 0), 2, ""),
        ([line(1, oldest_s=90)], Fleet(0, 0), 1, ""),  # but nobody was there to serve it
        ([line(9)], Fleet(0, 0, start_s=80.0), 1, "takes 80 s to start"),  # three would load for longer than they work
        ([line(18)], Fleet(0, 0, start_s=80.0), 2, "start within 80 s with 2"),
        ([line(9)], Fleet(1, 1, start_s=29.0), 3, "start within 30 s"),  # the target is the longer one
        ([line(1, oldest_s=90)], Fleet(2, 0, start_s=80.0), 1, ""),  # nor is it late yet
        ([line(1, oldest_s=161)], Fleet(2, 0, start_s=80.0), 3, "has waited 161 s"),
        ([line(running=1)], Fleet(4, 3), 3, "none of them is taken away"),
    ],
)
def test_workers_wanted(lines: list[Line], fleet: Fleet, expected: int, reason: str) -> None:
    found = wanted_workers(lines, fleet, target_s=30.0)
    assert found.wanted == expected
    assert reason in "; ".join(found.reasons)
