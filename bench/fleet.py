"""`python -m bench.fleet`: what a fleet costs and how long jobs wait, by how its size is chosen, in simulated time.

Loads are replayed against workers that take minutes to load their models and then batch continuously. `wanted_workers`,
fed with what the simulated jobs were measured to cost, is compared with scaling on queue length alone, one worker for K
that wait. K is chosen anew for each load, and with hindsight: the one with the fewest GPU-seconds whose 95th percentile
of waits is no longer, once over all jobs and once for each kind of job. All else is the same for both, and is what
`fusequeue pool` does: looks, cool-down, who starts and who leaves.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from bench.simulate import CURVES
from cli.pool.decisions import PoolBounds, PoolWorker, WantedWorkers, plan_changes, recent_wants, target_workers
from shared.autoscaling import Fleet, SignatureLoad, wanted_workers
from worker.cost_curves import efficient_rows

LOOK_S = 5.0
COOL_DOWN_S = 60.0
TARGET_WAIT_S = 30.0
MOST_WORKERS = 16
MAX_BATCH = 8
OVERDUE_S = 2.0
LEARNED = 0.1  # weight of the newest job in what a kind is known to cost, as in settle.lua
EVERY_K = (*range(1, 21), 24, 28, 32, 40, 48, 64, 96, 128, 192, 256, 400)


@dataclass(frozen=True, eq=False)
class Kind:
    """One signature: its steps, seconds of a lone one, and what rows gain."""

    name: str
    steps: int
    step_s: float
    gains: dict[int, float]

    def curve(self) -> dict[int, float]:
        """Return seconds per forward by rows."""
        return {rows: self.step_s * rows / gain for rows, gain in self.gains.items()}


SMALL = Kind("small", 28, 0.05, CURVES["512"])
LARGE = Kind("large", 40, 0.35, CURVES["1024"])
VIDEO = Kind("video", 50, 1.2, {1: 1.0, 2: 1.01})


@dataclass(eq=False)
class Job:
    kind: Kind
    arrival_s: float
    left: float = 0.0
    start_s: float = 0.0
    gpu_s: float = 0.0
    forward_rows: float = 0.0


@dataclass
class Learned:
    """What a kind's seats were measured to cost, and in forwards of how many rows."""

    seat_s: float | None = None
    rows: float = 1.0

    def take(self, job: Job) -> None:
        rows = job.forward_rows / job.kind.steps
        if self.seat_s is None:
            self.seat_s, self.rows = job.gpu_s, rows
        else:
            self.seat_s += LEARNED * (job.gpu_s - self.seat_s)
            self.rows += LEARNED * (rows - self.rows)


@dataclass(eq=False)
class Worker:
    slot: int
    started_s: float
    ready_s: float
    kind: Kind | None = None
    running: list[Job] = field(default_factory=list)
    at_s: float = 0.0
    turn: int = 0  # of its entry in the calendar that counts


Policy: TypeAlias = Callable[[Sequence[SignatureLoad], Fleet], int]


def by_cost(lines: Sequence[SignatureLoad], fleet: Fleet) -> int:
    return wanted_workers(lines, fleet, TARGET_WAIT_S).wanted


def by_length(jobs_a_worker: int) -> Policy:
    """Return the policy of one worker for so many that wait; like the other it never goes below the busy ones."""

    def wanted(lines: Sequence[SignatureLoad], fleet: Fleet) -> int:
        return max(fleet.busy, math.ceil(sum(line.queued_slots for line in lines) / jobs_a_worker))

    return wanted


@dataclass(frozen=True)
class Outcome:
    """GPU-seconds from each worker's start to its end, and how long jobs waited for their seat."""

    gpu_s: float
    waits_s: tuple[tuple[Kind, float], ...]
    most_workers: int

    def wait_s(self, share: float, of: Kind | None = None) -> float:
        """Return a percentile of the waits of all jobs, or of those of one kind."""
        waits = sorted(wait for kind, wait in self.waits_s if of in (None, kind))
        return waits[min(len(waits) - 1, int(share * len(waits)))]

    def no_longer_than(self, other: Outcome, *, each_kind: bool) -> bool:
        """Tell whether the 95th percentile is at most the other's, over all jobs, or for each kind of job too."""
        kinds = {kind for kind, _ in self.waits_s} if each_kind else set()
        return all(self.wait_s(0.95, of) <= other.wait_s(0.95, of) for of in (None, *kinds))


@dataclass(frozen=True)
class Load:
    """Jobs by arrival, and the least and most seconds a worker takes to load its models."""

    name: str
    arrivals: tuple[tuple[float, Kind], ...]
    loading_s: tuple[float, float]


class Fleets:
    """One replay of a load: a calendar of arrivals, looks, loaded models and ends of jobs."""

    def __init__(self, load: Load, policy: Policy, seed: int) -> None:
        self._load = load
        self._policy = policy
        self._chance = random.Random(seed)
        self._calendar: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._now = 0.0
        self._lines: dict[Kind, deque[Job]] = {}
        self._learned: dict[Kind, Learned] = {}
        self._curves = {kind: kind.curve() for kind in {kind for _, kind in load.arrivals}}
        self._rows = {kind: efficient_rows(curve, MAX_BATCH) for kind, curve in self._curves.items()}
        self._workers: dict[int, Worker] = {}
        self._wants: tuple[WantedWorkers, ...] = ()
        self._ended: list[Job] = []
        self._gpu_s = 0.0
        self._start_s: float | None = None
        self._most = 0

    def run(self) -> Outcome:
        for at_s, kind in self._load.arrivals:
            self._at(at_s, lambda kind=kind: self._arrive(kind))  # type: ignore[misc]
        self._at(0.0, self._look)
        while self._calendar:
            self._now, _, happens = heapq.heappop(self._calendar)
            happens()
        return Outcome(self._gpu_s, tuple((job.kind, job.start_s - job.arrival_s) for job in self._ended), self._most)

    def _at(self, when_s: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._calendar, (when_s, next(self._order), happens))

    def _arrive(self, kind: Kind) -> None:
        self._lines.setdefault(kind, deque()).append(Job(kind, self._now, left=kind.steps))
        for worker in self._workers.values():
            if worker.ready_s <= self._now:
                self._serve(worker)

    def _serve(self, worker: Worker) -> None:
        """Bring a worker up to now, give it what it may claim, and put its next end into the calendar."""
        self._advance(worker)
        if not worker.running:
            waiting = [line[0] for line in self._lines.values() if line]
            worker.kind = min(waiting, key=lambda job: job.arrival_s).kind if waiting else None
        kind = worker.kind
        if kind is not None and not (worker.running and self._overdue(kind)):
            line = self._lines.get(kind, deque())
            while line and len(worker.running) < self._rows[kind]:
                line[0].start_s = self._now
                worker.running.append(line.popleft())
        worker.turn += 1
        if worker.running:
            first = min(job.left for job in worker.running) * self._forward_s(worker)
            self._at(self._now + first, lambda turn=worker.turn: self._end(worker, turn))  # type: ignore[misc]

    def _overdue(self, running: Kind) -> bool:
        return any(
            line and self._now - line[0].arrival_s > OVERDUE_S for kind, line in self._lines.items() if kind != running
        )

    def _advance(self, worker: Worker) -> None:
        passed, rows = self._now - worker.at_s, len(worker.running)
        worker.at_s = self._now
        if not rows:
            return
        forwards = passed / self._forward_s(worker)
        for job in worker.running:
            job.left -= forwards
            job.gpu_s += passed / rows
            job.forward_rows += forwards * rows
        for job in [job for job in worker.running if job.left < 1e-6]:
            worker.running.remove(job)
            self._learned.setdefault(job.kind, Learned()).take(job)
            self._ended.append(job)

    def _forward_s(self, worker: Worker) -> float:
        assert worker.kind is not None
        curve, rows = self._curves[worker.kind], len(worker.running)
        below = max(known for known in curve if known <= rows)
        above = min((known for known in curve if known >= rows), default=below)
        share = 0.0 if above == below else (rows - below) / (above - below)
        return curve[below] + share * (curve[above] - curve[below])

    def _end(self, worker: Worker, turn: int) -> None:
        if turn == worker.turn:
            self._serve(worker)

    def _look(self) -> None:
        alive = self._workers.values()
        fleet = Fleet(
            alive=len(alive),
            busy=sum(bool(worker.running) for worker in alive),
            starting=sum(worker.ready_s > self._now for worker in alive),
            settled_s=min((self._now - worker.ready_s for worker in alive), default=None),
            start_s=self._start_s or 0.0,
        )
        want = WantedWorkers(self._now, self._policy(self._seen(), fleet))
        self._wants = recent_wants(self._wants, want, COOL_DOWN_S)
        target = target_workers(self._wants, 0, PoolBounds(0, MOST_WORKERS, COOL_DOWN_S))
        found = plan_changes(self._members(), target, MOST_WORKERS)
        for slot in found.drain:
            self._gpu_s += self._now - self._workers.pop(slot).started_s
        for slot in found.start:
            ready_s = self._now + self._chance.uniform(*self._load.loading_s)
            worker = self._workers[slot] = Worker(slot, self._now, ready_s, at_s=ready_s)
            self._at(ready_s, lambda worker=worker: self._loaded(worker))  # type: ignore[misc]
        self._most = max(self._most, len(self._workers))
        if self._calendar or self._workers or any(self._lines.values()):
            self._at(self._now + LOOK_S, self._look)

    def _loaded(self, worker: Worker) -> None:
        if self._workers.get(worker.slot) is worker:  # it may have left while it loaded
            took_s = worker.ready_s - worker.started_s
            self._start_s = took_s if self._start_s is None else self._start_s + LEARNED * (took_s - self._start_s)
            self._serve(worker)

    def _members(self) -> list[PoolWorker]:
        return [
            PoolWorker(one.slot, "ready" if one.ready_s <= self._now else "starting", one.started_s, len(one.running))
            for one in self._workers.values()
        ]

    def _seen(self) -> list[SignatureLoad]:
        running = [job.kind for worker in self._workers.values() for job in worker.running]
        lines = []
        for kind, line in self._lines.items():
            learned = self._learned.get(kind, Learned())
            lines.append(
                SignatureLoad(
                    signature=kind.name,
                    queued_slots=len(line),
                    running_slots=running.count(kind),
                    oldest_wait_s=self._now - line[0].arrival_s if line else 0.0,
                    slot_s=learned.seat_s,
                    rows=learned.rows,
                    cost_curve=self._curves[kind] if learned.seat_s is not None else None,
                )
            )
        return lines


def _steady(rate: Callable[[float], float], most: float, span_s: float, chance: random.Random) -> Iterator[float]:
    """Yield arrivals at random whose rate changes over time and is never above `most`, a second."""
    at_s = chance.expovariate(most)
    while at_s < span_s:
        if chance.random() < rate(at_s) / most:
            yield at_s
        at_s += chance.expovariate(most)


def bursts(seed: int) -> Load:
    """Every twenty minutes a burst: of small pictures, of large ones, of videos."""
    chance, found = random.Random(seed), []
    for at in range(12):
        kind, count = ((SMALL, 600), (LARGE, 60), (VIDEO, 20))[at % 3]
        found += [(60 + 1200 * at + chance.uniform(0, 30), kind) for _ in range(count)]
    return Load("bursts", tuple(sorted(found, key=lambda row: row[0])), (60.0, 180.0))


def daily_wave(seed: int) -> Load:
    """A day in eight hours: small and large pictures while it is light, videos mostly when it is dark."""
    chance, span_s = random.Random(seed), 8 * 3600.0

    def light(at_s: float) -> float:
        return 0.5 - 0.5 * math.cos(2 * math.pi * at_s / span_s)

    found = [(at_s, SMALL) for at_s in _steady(lambda at: 2.0 * light(at), 2.0, span_s, chance)]
    found += [(at_s, LARGE) for at_s in _steady(lambda at: 0.1 * light(at), 0.1, span_s, chance)]
    found += [(at_s, VIDEO) for at_s in _steady(lambda at: 0.05 * (1 - light(at)), 0.05, span_s, chance)]
    return Load("daily wave", tuple(sorted(found, key=lambda row: row[0])), (60.0, 180.0))


def cold_starts(seed: int) -> Load:
    """A few jobs now and then, of one kind each time, and always the longest load."""
    chance, found, at_s = random.Random(seed), [], 0.0
    for _ in range(40):
        at_s += 300 + chance.expovariate(1 / 300)
        kind, most = chance.choice(((SMALL, 80), (LARGE, 20), (VIDEO, 6)))
        found += [(at_s + chance.uniform(0, 10), kind) for _ in range(chance.randint(1, most))]
    return Load("cold starts", tuple(sorted(found, key=lambda row: row[0])), (180.0, 180.0))


Make: TypeAlias = Callable[[int], Load]
LOADS: tuple[Make, ...] = (bursts, daily_wave, cold_starts)


@dataclass(frozen=True)
class Compared:
    """A load replayed: by cost, and by length, with the K that is cheapest of those that wait no longer."""

    load: Load
    cost: Outcome
    length: tuple[Outcome, int]
    length_each_kind: tuple[Outcome, int]


def compare(load: Load, seed: int, tried: Sequence[int] = EVERY_K) -> Compared:
    """Replay a load both ways; raises `ValueError` where no K keeps the waits as short."""
    cost = Fleets(load, by_cost, seed).run()
    found = [(Fleets(load, by_length(k), seed).run(), k) for k in tried]

    def cheapest(each_kind: bool) -> tuple[Outcome, int]:
        fair = [row for row in found if row[0].no_longer_than(cost, each_kind=each_kind)]
        if not fair:
            raise ValueError(f"{load.name}: no K waits {cost.wait_s(0.95):.0f} s or less")
        return min(fair, key=lambda row: row[0].gpu_s)

    return Compared(load, cost, cheapest(each_kind=False), cheapest(each_kind=True))


def table(found: Compared) -> Iterator[str]:
    """Yield the rows that tell of one load."""
    (length, k), (each, k_each) = found.length, found.length_each_kind
    shown = {
        "cost": found.cost,
        f"length, K = {k}: p95 no longer": length,
        f"length, K = {k_each}: nor any kind's": each,
    }
    for name, one in shown.items():
        waits = " | ".join(f"{one.wait_s(0.95, of):.0f}" for of in (None, SMALL, LARGE, VIDEO))
        more = "" if one is found.cost else f" (+{100 * (one.gpu_s / found.cost.gpu_s - 1):.0f}%)"
        yield f"| {found.load.name} | {name} | {waits} | {one.gpu_s:.0f}{more} | {one.most_workers} |"


def main(line: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(line)
    print(
        f"{TARGET_WAIT_S:g} s aimed at, looks every {LOOK_S:g} s, cool-down {COOL_DOWN_S:g} s, "
        f"at most {MOST_WORKERS} workers, seed {options.seed}; waits are 95th percentiles, in seconds\n"
    )
    print("| load | scaled by | wait | small | large | video | GPU-seconds | most workers |")
    print("|---|---|---|---|---|---|---|---|")
    for make in LOADS:
        for row in table(compare(make(options.seed), options.seed)):
            print(row, flush=True)


if __name__ == "__main__":
    main()
