"""The fleet's simulator: it serves every job, and tells that knowing what jobs cost saves GPU-seconds."""

from __future__ import annotations

import pytest

from bench import fleet
from bench.fleet import LARGE, SMALL, Fleets, Load, bursts, by_cost, by_length, cold_starts, compare, daily_wave


@pytest.mark.parametrize(
    ("make", "tried"),
    [
        (bursts, (4, 5, 6, 8, 10, 12, 13, 14, 15, 16, 18)),
        (cold_starts, (4, 5, 6, 8, 10, 12, 13, 14, 15, 16, 18)),
        (daily_wave, (4, 5, 24, 28, 32, 40)),
    ],
)
def test_by_cost_takes_fewer_gpu_seconds_at_equal_waits(make: fleet.Make, tried: tuple[int, ...]) -> None:
    """Scaling on length alone has its best K for this very load, and costs more all the same.

    The seed is not that of the recorded table; the numbers tried are around the best there.
    """
    found = compare(make(2), seed=2, tried=tried)
    assert found.cost.gpu_s < found.length[0].gpu_s
    assert found.length[0].wait_s(0.95) <= found.cost.wait_s(0.95)
    assert found.cost.gpu_s < 0.95 * found.length_each_kind[0].gpu_s


def test_a_lone_job_costs_a_load_its_forwards_and_the_cool_down() -> None:
    one = Fleets(Load("one", ((1.0, LARGE),), (100.0, 100.0)), by_cost, seed=1).run()
    look_s = 5.0  # the first look that sees it
    assert one.waits_s == ((LARGE, pytest.approx(look_s + 100.0 - 1.0)),)
    least = 100.0 + LARGE.steps * LARGE.step_s + fleet.COOL_DOWN_S
    assert abs(one.gpu_s - least) <= fleet.LOOK_S, "the cool-down runs from the last look that saw it"


def test_rows_share_forwards_and_jobs_are_served_once_each() -> None:
    """Eight small jobs take a forward of eight rows 28 times, not 28 forwards each."""
    load = Load("eight", tuple((1.0, SMALL) for _ in range(8)), (10.0, 10.0))
    run = Fleets(load, by_length(8), seed=1)
    found = run.run()
    assert len(found.waits_s) == 8
    ends = 5.0 + 10.0 + SMALL.steps * SMALL.curve()[8]
    assert found.gpu_s <= ends - 5.0 + fleet.COOL_DOWN_S + 2 * fleet.LOOK_S
