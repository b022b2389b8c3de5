"""Jobs with mixed deadlines, as `python -m bench.queue.deadlines` sends them: their arrivals and time limits."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

BURST = 60
TIGHT, LOOSE = 3.5, 400.0
"""Deadlines, in mean times of a job that a full batch runs."""

TIGHT_SHARE, LOOSE_SHARE = 0.3, 0.1
"""Shares of the jobs; all others have no deadline."""


def share(met: Iterable[bool]) -> float | None:
    """Return the share of deadlines met; None without any."""
    known = list(met)
    return round(sum(known) / len(known), 4) if known else None


class MixedJob(NamedTuple):
    """A job that arrives at `at_s` and is to end within `limit_s`, None for no deadline."""

    at_s: float
    limit_s: float | None


@dataclass(frozen=True)
class DeadlineMix:
    """`jobs` at `load` times the `rate` (jobs per second) of full batches of `rows` rows."""

    load: float
    jobs: int
    seed: int

    def arrivals(self, rate: float, rows: int) -> list[MixedJob]:
        """Return about `jobs` jobs in order: single ones with a tight deadline, and bursts with a loose one or none.

        Arrival times are those of a Poisson process with a given number of arrivals: the load of each turn is exact.
        """
        rng, usual_s = random.Random(self.seed), rows / rate
        count = max(1, round((1 - TIGHT_SHARE) * self.jobs / BURST))
        loose = round(count * LOOSE_SHARE / (1 - TIGHT_SHARE))
        arriving: list[tuple[int, float | None]] = [(1, TIGHT * usual_s)] * round(TIGHT_SHARE * self.jobs)
        arriving += [(BURST, LOOSE * usual_s if number < loose else None) for number in range(count)]
        span_s = sum(jobs for jobs, _ in arriving) / (self.load * rate)
        timed = sorted(((rng.uniform(0, span_s), *one) for one in arriving), key=itemgetter(0))
        return [MixedJob(at_s, limit_s) for at_s, jobs, limit_s in timed for _ in range(jobs)]
