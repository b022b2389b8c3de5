"""`python -m bench.queue.deadlines`: deadlines met, ordered by slack and by priority and age, in simulated time.

Jobs of one priority and of two signatures, with 20 to 40 steps, at 0.8 of what a worker with full batches sustains:
single ones with a tight deadline, and bursts with a loose one or none. By priority and age the same jobs are queued
without their deadlines, at which they are stopped. `--json FILE` saves the figures.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path

from bench.common import record
from bench.simulate import MODEL, STEP_S, STEPS, two_kinds
from bench.simulator.kinds import GAINS, Arrival, JobKind, SimulatedJob
from bench.simulator.learned import DeviceTimes
from bench.simulator.policies import WINDOW_S, QueueOrder
from bench.simulator.queue import SimulatedQueue
from bench.simulator.report import percentile
from bench.simulator.simulation import SimulatedWorker, Simulation

BURST = 60
TIGHT, LOOSE = 3.5, 400.0
"""Deadlines, in mean times of a job that a full batch runs."""

TIGHT_SHARE, LOOSE_SHARE = 0.3, 0.1
"""Shares of the jobs; all others have no deadline."""


@dataclass(frozen=True)
class DeadlineFigures:
    """Shares of deadlines met, and the waits of jobs without one, in seconds."""

    curve: str
    order: str
    load: float
    met: float | None
    tight_met: float | None
    loose_met: float | None
    without_mean_s: float | None
    without_p99_s: float | None


@dataclass(frozen=True)
class DeadlineMix:
    """`jobs` at `load` times the rate of full batches."""

    load: float
    jobs: int
    seed: int

    def arrivals(self, kinds: Sequence[JobKind]) -> list[Arrival]:
        """Return about `jobs` jobs in order: single ones with a tight deadline, and bursts with a loose one or none.

        Arrival times are those of a Poisson process with a given number of arrivals: the load is exact.
        """
        rng, usual_s, rate = random.Random(self.seed), job_seconds(kinds[0]), kinds[0].rows / job_seconds(kinds[0])
        count = max(1, round((1 - TIGHT_SHARE) * self.jobs / BURST))
        loose = round(count * LOOSE_SHARE / (1 - TIGHT_SHARE))
        arriving: list[tuple[int, float | None]] = [(1, TIGHT * usual_s)] * round(TIGHT_SHARE * self.jobs)
        arriving += [(BURST, LOOSE * usual_s if number < loose else None) for number in range(count)]
        span_s = sum(jobs for jobs, _ in arriving) / (self.load * rate)
        timed = sorted(((rng.uniform(0, span_s), *one) for one in arriving), key=itemgetter(0))
        chance = random.Random(self.seed)
        return [
            Arrival(
                at_s,
                kinds[0 if chance.random() < 0.7 else 1],
                chance.choice(STEPS),
                deadline_s=None if limit_s is None else at_s + limit_s,
            )
            for at_s, jobs, limit_s in timed
            for _ in range(jobs)
        ]


def job_seconds(kind: JobKind) -> float:
    """Return the mean time of a job in full batches of the efficient rows."""
    return kind.forward_s(kind.rows) * statistics.mean(STEPS)


class DeadlineQueue(SimulatedQueue):
    """Jobs that end at their deadlines; `by_slack` they have a latest start, and end once they cannot meet them."""

    def __init__(self, *, by_slack: bool) -> None:
        super().__init__(WINDOW_S)
        self._by_slack, self._times = by_slack, DeviceTimes()
        self._ending: list[SimulatedJob] = []
        """Queued jobs with a deadline and without a latest start."""

    def add(self, job: SimulatedJob) -> None:
        by_s = job.arrival.deadline_s
        if by_s is not None and self._by_slack:
            job.start_by_ms = self._times.latest_start_ms(job, by_s, job.arrival.at_s)
        elif by_s is not None:
            self._ending.append(job)
        super().add(job)

    def ended(self, job: SimulatedJob, now_s: float) -> None:
        super().ended(job, now_s)
        self._times.learn(job, now_s)

    def run_ms(self, kind: JobKind, now_s: float) -> float:
        return self._times.run_ms(kind, now_s)

    def expire(self, running: list[SimulatedJob], now_s: float) -> None:
        for job in [job for job in running if (job.arrival.deadline_s or math.inf) <= now_s]:
            running.remove(job)
            self.running[job.arrival.tenant] -= 1
        for _, jobs in self.lanes():
            while (start_by_ms := jobs.start_by_ms) is not None and start_by_ms <= 1000 * now_s:
                late = jobs.dated.pop(0)
                late.start_by_ms, late.in_lane_s = None, now_s
                jobs.stream.append(late)
                self._ending.append(late)
        self._ending = [job for job in self._ending if job.start_s is None]
        for job in [job for job in self._ending if self._ends(job, now_s)]:
            self._ending.remove(job)
            self.jobs_of(job).stream.remove(job)

    def _ends(self, job: SimulatedJob, now_s: float) -> bool:
        by_s = job.arrival.deadline_s or math.inf
        return self._times.misses(job, by_s, now_s) if self._by_slack else by_s <= now_s


def run(curve: str, mix: DeadlineMix, *, by_slack: bool) -> list[SimulatedJob]:
    """Run the jobs of a mix with one worker; those that met no deadline may have no end."""
    kinds = two_kinds(curve)
    simulation = Simulation(QueueOrder(DeadlineQueue(by_slack=by_slack), [MODEL]), [SimulatedWorker()], by_step=True)
    simulation.run(mix.arrivals(kinds))
    return simulation.jobs


def figures(curve: str, mix: DeadlineMix, *, by_slack: bool) -> DeadlineFigures:
    jobs = run(curve, mix, by_slack=by_slack)
    middle_s = job_seconds(jobs[0].kind) * (TIGHT + LOOSE) / 2
    limits = [
        (job.met, job.arrival.deadline_s - job.arrival.at_s) for job in jobs if job.arrival.deadline_s is not None
    ]
    waits = sorted(job.latency_s for job in jobs if job.arrival.deadline_s is None)
    return DeadlineFigures(
        curve=curve,
        order="slack" if by_slack else "priority and age",
        load=mix.load,
        met=share(met for met, _ in limits),
        tight_met=share(met for met, limit_s in limits if limit_s < middle_s),
        loose_met=share(met for met, limit_s in limits if limit_s > middle_s),
        without_mean_s=round(statistics.mean(waits), 2) if waits else None,
        without_p99_s=round(percentile(waits, 0.99), 2) if waits else None,
    )


def share(met: Iterable[bool]) -> float | None:
    """Return the share of deadlines met; None without any."""
    known = list(met)
    return round(sum(known) / len(known), 4) if known else None


def main(argv: list[str] | None = None) -> None:
    """Measure both orders, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=6000)
    parser.add_argument("--load", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    mix = DeadlineMix(options.load, options.jobs, options.seed)
    results = [asdict(figures(curve, mix, by_slack=by_slack)) for curve in GAINS for by_slack in (False, True)]
    record.report(options.json, {"results": results}, step_ms=1000 * STEP_S, tight=TIGHT, loose=LOOSE)


if __name__ == "__main__":
    main()
