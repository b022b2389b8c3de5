"""Jobs with mixed deadlines, as `python -m bench.queue.deadlines` sends them: their arrivals and time limits."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
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

    def arrivals(self, rate: float, rows: int) -> Iterator[MixedJob]:
        """Yield the jobs in order: single ones with a tight deadline, and bursts with a loose one or none."""
        rng, usual_s, now = random.Random(self.seed), rows / rate, 0.0
        weights = [TIGHT_SHARE, LOOSE_SHARE / BURST, (1 - TIGHT_SHARE - LOOSE_SHARE) / BURST]
        limits = (TIGHT * usual_s, LOOSE * usual_s, None)
        sent = 0
        while sent < self.jobs:
            now += rng.expovariate(self.load * rate * sum(weights))
            kind = rng.choices(range(3), weights)[0]
            for _ in range(min(self.jobs - sent, 1 if kind == 0 else BURST)):
                sent += 1
                yield MixedJob(now, limits[kind])
