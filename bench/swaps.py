"""`python -m bench.swaps`: how often workers load another model, by whom they serve next, in simulated time.

Workers hold one model each, and jobs of several models arrive at random. What serves them is the decision that runs in
production (`swaps` in the queue's Lua), compared with serving whatever ripened first, which knows of no memory. All
else is the same: jobs join a running batch unless those of another model are overdue.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lupa import lua51

from bench.simulate import CURVES, OVERDUE_S

STEPS = 28
STEP_S = 0.05
ROWS = 8
SECONDS = {rows: STEP_S * rows / gain for rows, gain in CURVES["512"].items()}
SEAT_S = STEPS * SECONDS[ROWS] / ROWS
SPAN_S = 4 * 3600.0


@dataclass(eq=False)
class Job:
    model: int
    arrival_s: float
    left: float = STEPS
    start_s: float = 0.0


@dataclass(eq=False)
class Worker:
    model: int | None = None
    ready_s: float = 0.0  # when what it loads is loaded
    running: list[Job] = field(default_factory=list)
    at_s: float = 0.0
    turn: int = 0


@dataclass(frozen=True)
class Line:
    """A model's waiting jobs as a worker sees them; `load_s` is 0 where it has the model, `holders` are others."""

    model: int
    ripe_s: float
    waiting: int
    load_s: float
    holders: int


class ByRipening:
    """Whatever has waited longest."""

    def turn_s(self, line: Line) -> float:
        return line.ripe_s

    def free_s(self, line: Line) -> float:
        return line.ripe_s

    def goes_before(self, line: Line, own: Line | None, now: float) -> bool:
        """Tell whether it ends the admissions to a running batch."""
        return self.turn_s(line) <= now - OVERDUE_S


class InMemoryFirst(ByRipening):
    """The queue's decision, run from its own Lua text in the Lua that Redis has; two kinds in a process crash it."""

    def __init__(self) -> None:
        lua = lua51.LuaRuntime()
        self._lua = lua
        self._swaps: Any = lua.execute(Path("shared/queue/lua/swaps.lua").read_text("utf-8") + "\nreturn swaps")

    def _told(self, line: Line) -> Any:
        work = line.waiting * SEAT_S
        told = {"ripe": line.ripe_s, "load": line.load_s, "holders": line.holders, "work": work}
        return self._lua.table_from(told)

    def turn_s(self, line: Line) -> float:
        return float(self._swaps.turn_at(self._told(line)))

    def free_s(self, line: Line) -> float:
        return float(self._swaps.free_at(self._told(line)))

    def goes_before(self, line: Line, own: Line | None, now: float) -> bool:
        turn_s = self.turn_s(line)
        if turn_s > now - OVERDUE_S:
            return False
        return not line.load_s or (self.free_s(line) <= now and not (own and own.ripe_s <= turn_s))


@dataclass(frozen=True)
class Demand:
    """Workers, the seconds a load takes, how busy full batches would keep the workers, and each model's share of it."""

    name: str
    workers: int
    load_s: float
    busy: float
    shares: tuple[float, ...]
    span_s: float = SPAN_S

    def arrivals(self, seed: int) -> list[Job]:
        chance, now, jobs = random.Random(seed), 0.0, []
        rate = self.busy * self.workers / SEAT_S
        while (now := now + chance.expovariate(rate)) < self.span_s:
            jobs.append(Job(chance.choices(range(len(self.shares)), self.shares)[0], now))
        return jobs


@dataclass(frozen=True)
class Outcome:
    loads: int
    waits_s: tuple[float, ...]

    def wait_s(self, share: float) -> float:
        return self.waits_s[min(len(self.waits_s) - 1, int(share * len(self.waits_s)))]


class Fleet:
    """One replay: a calendar of arrivals, loaded models, ends of jobs, and moments at which a worker may look again."""

    def __init__(self, demand: Demand, policy: ByRipening, seed: int) -> None:
        self._demand = demand
        self._policy = policy
        self._jobs = demand.arrivals(seed)
        self._workers = [Worker() for _ in range(demand.workers)]
        self._lines: dict[int, deque[Job]] = {model: deque() for model in range(len(demand.shares))}
        self._calendar: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._now = 0.0
        self._loads = 0

    def run(self) -> Outcome:
        for job in self._jobs:
            self._at(job.arrival_s, lambda job=job: self._arrive(job))  # type: ignore[misc]
        while self._calendar:
            self._now, _, happens = heapq.heappop(self._calendar)
            happens()
        return Outcome(self._loads, tuple(sorted(job.start_s - job.arrival_s for job in self._jobs)))

    def _at(self, when_s: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._calendar, (when_s, next(self._order), happens))

    def _arrive(self, job: Job) -> None:
        self._lines[job.model].append(job)
        for worker in self._workers:
            self._serve(worker)

    def _serve(self, worker: Worker) -> None:
        """Bring a worker up to now, give it what it may claim, and put its next moment into the calendar."""
        if worker.ready_s > self._now:
            return
        self._advance(worker)
        lines = self._seen(worker)
        if worker.running:
            own = next((line for line in lines if line.model == worker.model), None)
            others = [line for line in lines if line.model != worker.model]
            if not any(self._policy.goes_before(line, own, self._now) for line in others):
                self._admit(worker)
        else:
            self._start(worker, lines)
        worker.turn += 1
        if worker.running:
            ends_s = max(worker.ready_s, self._now) + min(job.left for job in worker.running) * self._forward_s(worker)
            self._at(ends_s, lambda turn=worker.turn: self._again(worker, turn))  # type: ignore[misc]
        elif lines and (later := [at for at in map(self._policy.free_s, lines) if at > self._now]):
            self._at(min(later), lambda turn=worker.turn: self._again(worker, turn))  # type: ignore[misc]

    def _again(self, worker: Worker, turn: int) -> None:
        if turn == worker.turn:
            self._serve(worker)

    def _start(self, worker: Worker, lines: Sequence[Line]) -> None:
        free = [line for line in lines if self._policy.free_s(line) <= self._now]
        if not free:
            return
        first = min(free, key=lambda line: (self._policy.turn_s(line), line.model))
        if first.load_s:
            self._loads += 1
            worker.model, worker.ready_s = first.model, self._now + first.load_s
            self._at(worker.ready_s, lambda: self._serve(worker))
        self._admit(worker)

    def _admit(self, worker: Worker) -> None:
        assert worker.model is not None
        line = self._lines[worker.model]
        while line and len(worker.running) < ROWS:
            line[0].start_s = max(self._now, worker.ready_s)
            worker.running.append(line.popleft())

    def _advance(self, worker: Worker) -> None:
        if worker.running:
            forwards = (self._now - max(worker.at_s, worker.ready_s)) / self._forward_s(worker)
            for job in worker.running:
                job.left -= forwards
            worker.running = [job for job in worker.running if job.left > 1e-6]
        worker.at_s = self._now

    def _forward_s(self, worker: Worker) -> float:
        rows = len(worker.running)
        below = max(known for known in SECONDS if known <= rows)
        above = min(known for known in SECONDS if known >= rows)
        share = 0.0 if above == below else (rows - below) / (above - below)
        return SECONDS[below] + share * (SECONDS[above] - SECONDS[below])

    def _seen(self, worker: Worker) -> list[Line]:
        holding = [other.model for other in self._workers if other is not worker]
        return [
            Line(
                model,
                line[0].arrival_s,
                len(line),
                0.0 if model == worker.model else self._demand.load_s,
                holding.count(model),
            )
            for model, line in self._lines.items()
            if line
        ]


DEMANDS = (
    Demand("2 models on 2 workers, quiet", 2, 20.0, 0.1, (1, 1)),
    Demand("3 models on 2 workers, quiet", 2, 20.0, 0.1, (1, 1, 1)),
    Demand("3 models on 2 workers", 2, 20.0, 0.5, (1, 1, 1)),
    Demand("3 models on 2 workers, busy", 2, 20.0, 0.8, (1, 1, 1)),
    Demand("one model asked for most", 2, 20.0, 0.6, (8, 1, 1)),
    Demand("6 models on 4 workers", 4, 60.0, 0.5, (6, 3, 2, 1, 1, 1)),
)
POLICIES: dict[str, Callable[[], ByRipening]] = {"by ripening": ByRipening, "in memory first": InMemoryFirst}


def main(line: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(line)
    print(f"{SPAN_S / 3600:g} hours of arrivals, {STEPS} steps, at most {ROWS} rows, seed {options.seed}; in seconds\n")
    print("| demand | a load | served | loads | loading, of the span | p50 wait | p95 | longest |")
    print("|---|---|---|---|---|---|---|---|")
    for demand in DEMANDS:
        for name, make in POLICIES.items():
            found = Fleet(demand, make(), options.seed).run()
            share = found.loads * demand.load_s / (demand.workers * demand.span_s)
            waits = " | ".join(f"{found.wait_s(part):.0f}" for part in (0.5, 0.95, 1.0))
            print(f"| {demand.name} | {demand.load_s:g} | {name} | {found.loads} | {share:.1%} | {waits} |", flush=True)


if __name__ == "__main__":
    main()
