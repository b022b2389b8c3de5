"""`python -m bench.fleet`: GPU-seconds and waits of a fleet by scaling policy, in simulated time.

`GET /v1/scale`, with the measured costs of the simulated jobs, is compared with scaling on queue length: one worker per
K queued jobs. K is chosen for each load with hindsight: the one with the fewest GPU-seconds among those with a 95th
percentile of waits that is not longer, once over all jobs and once for each kind of job.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.fleet import decision
from bench.fleet.fleet_loads import LARGE, LOADS, SMALL, VIDEO, FleetLoad
from bench.fleet.fleet_state import TARGET_WAIT_S, FleetState
from bench.fleet.simulation import MAX_WORKERS, POLL_S, FleetOutcome, FleetSimulation, Policy
from bench.simulator.report import print_table

K_VALUES = (*range(1, 21), 24, 28, 32, 40, 48, 64, 96, 128, 192, 256, 400)


def by_length(jobs_per_worker: int) -> Policy:
    """Return the policy of one worker per so many queued jobs, but never fewer than the busy ones."""

    def wanted(state: FleetState) -> int:
        return max(state.busy, math.ceil(state.queued / jobs_per_worker))

    return wanted


@dataclass(frozen=True)
class FleetComparison:
    """A load scaled by cost, and by length with the cheapest K among those with no longer waits."""

    load: FleetLoad
    cost: FleetOutcome
    length: tuple[FleetOutcome, int]
    length_each_kind: tuple[FleetOutcome, int]


def compare(load: FleetLoad, seed: int, k_values: Sequence[int] = K_VALUES) -> FleetComparison:
    """Simulate a load with both policies; raises `ValueError` if no K keeps the waits as short."""
    cost = FleetSimulation(load, decision.wanted, seed).outcome()
    outcomes = [(FleetSimulation(load, by_length(k), seed).outcome(), k) for k in k_values]

    def cheapest(each_kind: bool) -> tuple[FleetOutcome, int]:
        fair = [row for row in outcomes if row[0].no_longer_than(cost, each_kind=each_kind)]
        if not fair:
            raise ValueError(f"{load.name}: no K waits {cost.wait_s(0.95):.0f} s or less")
        return min(fair, key=lambda row: row[0].gpu_s)

    return FleetComparison(load, cost, cheapest(each_kind=False), cheapest(each_kind=True))


def rows(comparison: FleetComparison) -> Iterator[tuple[object, ...]]:
    """Yield the table rows of one load."""
    (length, k), (each, k_each) = comparison.length, comparison.length_each_kind
    outcomes = {
        "cost": comparison.cost,
        f"length, K = {k}: p95 not longer": length,
        f"length, K = {k_each}: nor that of any kind": each,
    }
    for name, outcome in outcomes.items():
        waits = (f"{outcome.wait_s(0.95, kind):.0f}" for kind in (None, SMALL, LARGE, VIDEO))
        more = "" if outcome is comparison.cost else f" (+{100 * (outcome.gpu_s / comparison.cost.gpu_s - 1):.0f}%)"
        yield comparison.load.name, name, *waits, f"{outcome.gpu_s:.0f}{more}", outcome.max_workers


def print_comparisons(seed: int) -> None:
    print(
        f"{TARGET_WAIT_S:g} s target wait, polls every {POLL_S:g} s, cool-down {FleetLoad.cool_down_s:g} s, "
        f"at most {MAX_WORKERS} workers, seed {seed}; waits are 95th percentiles, in seconds\n"
    )
    compared = (compare(make_load(seed), seed) for make_load in LOADS)
    print_table(
        "load | scaled by | wait | small | large | video | GPU-seconds | most workers",
        (row for one in compared for row in rows(one)),
    )
