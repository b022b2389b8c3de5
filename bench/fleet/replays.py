"""Replays of what makes a fleet too large: bulk windows, limits, unknown costs, unserved models, failing loads.

Each replay states the workers that it needs from when on: enough to start the jobs within the target, or within a start
where that is longer, and to end bulk jobs in time, by the true costs of its jobs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from bench.fleet.fleet_loads import LARGE, SMALL, VIDEO, FleetLoad, arrival, by_time
from bench.fleet.fleet_state import BULK_WINDOW_S, TARGET_WAIT_S
from bench.fleet.simulation import FleetOutcome
from bench.simulator.kinds import Arrival, JobKind

HOUR = 3600.0
LOADING_S = (60.0, 180.0)
SETTLE_S = 60.0
"""A change of the need counts after the first minute."""


@dataclass(frozen=True)
class Replay:
    """A load, and the workers that it needs: steps of (from when on, workers)."""

    load: FleetLoad
    need: tuple[tuple[float, int], ...]

    def most_above(self, outcome: FleetOutcome) -> int:
        """Return the largest excess of the wanted workers over the need, without the first minute of each step."""
        most = 0
        for (begin, need), (end, _) in pairwise([*self.need, (math.inf, 0)]):
            for (at, workers), (until, _) in pairwise([*outcome.wanted, (math.inf, 0)]):
                if until > begin + SETTLE_S and at < end:
                    most = max(most, workers - need)
        return most


def workers_for(jobs: Sequence[tuple[JobKind, int]], loading_s: tuple[float, float] = LOADING_S) -> int:
    """Return the workers that start a burst of jobs within the target, or a start: the last batch need not end."""
    within_s = max(TARGET_WAIT_S, sum(loading_s) / 2)
    share = 0.0
    for kind, count in jobs:
        image_s = kind.image_s(kind.rows)
        share += count * image_s / (within_s + kind.rows * image_s)
    return math.ceil(share)


def _burst(at_s: float, jobs: Sequence[tuple[JobKind, int]], rng: random.Random) -> list[Arrival]:
    return [arrival(at_s + rng.uniform(0, 10), kind) for kind, count in jobs for _ in range(count)]


def batch_with_window(_: random.Random) -> Replay:
    """20,000 bulk jobs that are to have ended after 24 hours."""
    jobs = tuple(arrival(0.0, LARGE, bulk=True, due_s=24 * HOUR) for _ in range(20_000))
    work_s = len(jobs) * LARGE.image_s(LARGE.rows)
    load = FleetLoad("batch of 24 hours", jobs, LOADING_S, known=True)
    return Replay(load, ((0.0, math.ceil(work_s / (24 * HOUR))),))


def bulk_behind_bursts(rng: random.Random) -> Replay:
    """Bulk jobs without a deadline all the time, and three bursts."""
    burst = ((SMALL, 600), (LARGE, 30))
    arrivals = [arrival(0.0, LARGE, bulk=True) for _ in range(600)]
    share = 600 * LARGE.image_s(1) / BULK_WINDOW_S
    need = [(0.0, math.ceil(share))]
    for at_s in (600.0, 2400.0, 4200.0):
        arrivals += _burst(at_s, burst, rng)
        need += [(at_s, workers_for(burst) + math.ceil(share)), (at_s + 480.0, math.ceil(share))]
    load = FleetLoad("bursts over bulk jobs", by_time(arrivals), LOADING_S, known=True)
    return Replay(load, tuple(need))


def limited_tenant(rng: random.Random) -> Replay:
    """2,000 jobs of a tenant that is limited to one running slot."""
    arrivals = [arrival(60 + rng.uniform(0, 10), SMALL, "limited") for _ in range(2000)]
    load = FleetLoad("tenant with one slot", by_time(arrivals), LOADING_S, {"limited": 1}, known=True, until_s=HOUR)
    return Replay(load, ((0.0, 0), (60.0, 1)))


def unknown_cost(rng: random.Random) -> Replay:
    """A first burst on a new model."""
    burst = ((SMALL, 240),)
    load = FleetLoad("first burst, unknown cost", by_time(_burst(60.0, burst, rng)), LOADING_S)
    return Replay(load, ((0.0, 0), (60.0, workers_for(burst))))


def unserved_model(rng: random.Random) -> Replay:
    """Steady small jobs, and one job of a model that no worker serves; the cool-down is that of Kubernetes."""
    arrivals = [arrival(10.0 * at + rng.uniform(0, 5), SMALL) for at in range(240)]
    arrivals.append(arrival(300.0, VIDEO))
    load = FleetLoad(
        name="unserved model",
        arrivals=by_time(arrivals),
        loading_s=(20.0, 40.0),
        unserved=(VIDEO,),
        known=True,
        until_s=0.75 * HOUR,
        cool_down_s=300.0,
    )
    return Replay(load, ((0.0, 1),))


def failing_loads(rng: random.Random) -> Replay:
    """The hub refuses connections for 20 minutes; one worker tries again until it is back."""
    burst = ((SMALL, 600), (LARGE, 40))
    load = FleetLoad(
        "failing loads", by_time(_burst(60.0, burst, rng)), LOADING_S, hub_down=((0.0, 1200.0),), known=True
    )
    return Replay(load, ((0.0, 0), (60.0, 1), (1200.0, workers_for(burst))))


def flapping_hub(rng: random.Random) -> Replay:
    """The hub is down every other minute, and a load takes 20 to 40 s."""
    burst, loading_s = ((SMALL, 300), (LARGE, 20)), (20.0, 40.0)
    down = tuple((80.0 + 120 * number, 140.0 + 120 * number) for number in range(20))
    load = FleetLoad("flapping hub", by_time(_burst(60.0, burst, rng)), loading_s, hub_down=down, known=True)
    return Replay(load, ((0.0, 0), (60.0, workers_for(burst, loading_s))))


def usual_bursts(rng: random.Random) -> Replay:
    """Every twenty minutes a burst: of small images, of large ones, of videos."""
    arrivals, need = [], [(0.0, 0)]
    for number in range(12):
        burst, at_s = ((SMALL, 600), (LARGE, 60), (VIDEO, 20))[number % 3], 60.0 + 1200 * number
        arrivals += [arrival(at_s + rng.uniform(0, 30), burst[0]) for _ in range(burst[1])]
        need.append((at_s, workers_for([burst])))
    return Replay(FleetLoad("bursts", by_time(arrivals), LOADING_S, known=True), tuple(need))


REPLAYS = (
    batch_with_window,
    bulk_behind_bursts,
    limited_tenant,
    unknown_cost,
    unserved_model,
    failing_loads,
    flapping_hub,
    usual_bursts,
)
