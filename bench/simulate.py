"""`python -m bench.simulate`: latency under load by batching policy, in simulated time.

Jobs arrive at random (Poisson), in two signatures, with 20 to 40 steps. The decisions are the ones that run in
production: `rhythm` of the queue's Lua prelude says what is ripe, `worker.claiming` how many rows pay. They are
compared with three policies that other servers use. Loads are fractions of what one job at a time can serve.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lupa import lua51

from worker.cost_curves import efficient_rows

STEP_S = 0.05
WINDOW_S = 0.1
OVERDUE_S = 2.0
MAX_BATCH = 8
STEPS = (20, 28, 40)
# Published gains of batching, one GPU, Qwen-Image: pictures a second at so many rows over those at one.
CURVES = {
    "512": {1: 1.0, 2: 1.8, 4: 2.8, 8: 3.1},
    "1024": {1: 1.0, 2: 1.02, 4: 1.02, 8: 1.02},
}


@dataclass
class Job:
    arrival_s: float
    signature: int
    steps: int
    left: int = field(init=False)
    end_s: float = 0.0

    def __post_init__(self) -> None:
        self.left = self.steps


@dataclass(frozen=True)
class Curve:
    """Seconds per forward by rows, linear between the measured counts."""

    seconds: dict[int, float]

    @classmethod
    def from_gains(cls, gains: dict[int, float]) -> Curve:
        return cls({rows: STEP_S * rows / gain for rows, gain in gains.items()})

    def at(self, rows: int) -> float:
        if rows in self.seconds:
            return self.seconds[rows]
        below = max(known for known in self.seconds if known < rows)
        above = min(known for known in self.seconds if known > rows)
        share = (rows - below) / (above - below)
        return self.seconds[below] + share * (self.seconds[above] - self.seconds[below])


def arrivals(load: float, count: int, seed: int) -> list[Job]:
    """Return `count` jobs that offer `load` times what one job at a time can serve."""
    chance = random.Random(seed)
    rate = load / (STEP_S * statistics.mean(STEPS))
    jobs, now = [], 0.0
    for _ in range(count):
        now += chance.expovariate(rate)
        jobs.append(Job(now, 0 if chance.random() < 0.7 else 1, chance.choice(STEPS)))
    return jobs


def run_batches(jobs: list[Job], curve: Curve, choose: Callable[[deque[Job], float], tuple[list[Job], float]]) -> None:
    """Serve whole batches: `choose` takes jobs off the line and says when they start; all end with the longest."""
    coming, line, now = deque(jobs), deque[Job](), 0.0
    while coming or line:
        if not line:
            now = max(now, coming[0].arrival_s)
        while coming and coming[0].arrival_s <= now:
            line.append(coming.popleft())
        batch, start = choose(line, now)
        if not batch:
            now = min(start, coming[0].arrival_s) if coming else start
            continue
        now = max(now, start) + curve.at(len(batch)) * max(job.steps for job in batch)
        for job in batch:
            job.end_s = now


def one_at_a_time(line: deque[Job], now: float) -> tuple[list[Job], float]:
    return [line.popleft()], now


def fixed_window(line: deque[Job], now: float) -> tuple[list[Job], float]:
    """Wait a window from the head's arrival for the head's signature to fill a batch; then run what there is."""
    head = line[0]
    fitting = [job for job in line if job.signature == head.signature][:MAX_BATCH]
    ends = head.arrival_s + WINDOW_S
    if len(fitting) < MAX_BATCH and now < ends:
        return [], ends
    for job in fitting:
        line.remove(job)
    return fitting, now


def strict_fifo(line: deque[Job], now: float) -> tuple[list[Job], float]:
    """Take jobs from the head for as long as they fit the first one."""
    batch = [line.popleft()]
    while line and len(batch) < MAX_BATCH and line[0].signature == batch[0].signature:
        batch.append(line.popleft())
    return batch, now


class Rhythm:
    """The queue's decision of what is ripe, run from its own Lua text."""

    def __init__(self) -> None:
        self._lua = lua51.LuaRuntime()
        self._lua.execute("KEYS = {'x'} conf = {}")
        text = Path("shared/queue/lua/prelude.lua").read_text()
        self._functions: Any = self._lua.execute(text + "\nreturn rhythm")
        self._last: dict[int, float] = {}
        self._gap: dict[int, float | None] = {}

    def arrived(self, job: Job) -> None:
        last = self._last.get(job.signature)
        since = None if last is None else 1000 * (job.arrival_s - last)
        self._gap[job.signature] = self._functions.next_gap(self._gap.get(job.signature), since, 1000 * WINDOW_S)
        self._last[job.signature] = job.arrival_s

    def ripe_at(self, waiting: list[Job], now: float, paying: int) -> float:
        """Return when these jobs of one signature may start, in seconds."""
        state = {
            "now": 1000 * now,
            "oldest": 1000 * waiting[0].arrival_s,
            "seats": len(waiting),
            "paying": paying,
            "window": 1000 * WINDOW_S,
            "gap": self._gap.get(waiting[0].signature),
        }
        return float(self._functions.ripe_at(self._lua.table_from(state))) / 1000


class Continuous:
    """fusequeue's way: ripe signatures start, jobs join and leave at any step, overdue ones stop admissions."""

    def __init__(self, jobs: list[Job], curve: Curve) -> None:
        self._coming = deque(jobs)
        self._curve = curve
        self._rows = efficient_rows(curve.seconds, MAX_BATCH)
        self._rhythm = Rhythm()
        self._line: dict[int, list[Job]] = {}
        self._running: list[Job] = []
        self._now = 0.0

    def run(self) -> None:
        while self._coming or self._running or any(self._line.values()):
            self._arrive()
            if self._running:
                self._join()
            else:
                self._start()
            if self._running:
                self._step()
            else:
                self._now = min(self._next_times())

    def _arrive(self) -> None:
        while self._coming and self._coming[0].arrival_s <= self._now:
            job = self._coming.popleft()
            self._rhythm.arrived(job)
            self._line.setdefault(job.signature, []).append(job)

    def _ripe(self) -> Iterator[tuple[float, int]]:
        for signature, waiting in self._line.items():
            if waiting:
                yield self._rhythm.ripe_at(waiting, self._now, self._rows), signature

    def _start(self) -> None:
        ripe = sorted(entry for entry in self._ripe() if entry[0] <= self._now)
        if ripe:
            self._admit(ripe[0][1])

    def _join(self) -> None:
        own = self._running[0].signature
        if all(self._now - at <= OVERDUE_S for at, signature in self._ripe() if signature != own):
            self._admit(own)

    def _admit(self, signature: int) -> None:
        waiting = self._line.get(signature, [])
        free = self._rows - len(self._running)
        self._running += waiting[:free]
        del waiting[:free]

    def _step(self) -> None:
        self._now += self._curve.at(len(self._running))
        for job in self._running:
            job.left -= 1
            if not job.left:
                job.end_s = self._now
        self._running = [job for job in self._running if job.left]

    def _next_times(self) -> list[float]:
        times = [max(at, self._now + 1e-6) for at, _ in self._ripe()]
        return [*times, self._coming[0].arrival_s] if self._coming else times


POLICIES: dict[str, Callable[[list[Job], Curve], None]] = {
    "one at a time": lambda jobs, curve: run_batches(jobs, curve, one_at_a_time),
    "fixed window": lambda jobs, curve: run_batches(jobs, curve, fixed_window),
    "strict FIFO": lambda jobs, curve: run_batches(jobs, curve, strict_fifo),
    "fusequeue": lambda jobs, curve: Continuous(jobs, curve).run(),
}


def measure(policy: str, curve: Curve, load: float, count: int, seed: int) -> tuple[float, float, float]:
    """Return mean latency and 99th percentile (s) and throughput (jobs/s)."""
    jobs = arrivals(load, count, seed)
    POLICIES[policy](jobs, curve)
    latencies = sorted(job.end_s - job.arrival_s for job in jobs)
    span = max(job.end_s for job in jobs) - jobs[0].arrival_s
    return statistics.mean(latencies), latencies[int(0.99 * len(latencies))], len(jobs) / span


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(f"{options.jobs} jobs, steps {STEPS}, {STEP_S * 1000:.0f} ms a lone step, window {WINDOW_S * 1000:.0f} ms\n")
    print("| curve | load | policy | mean s | p99 s | jobs/s |\n|---|---|---|---|---|---|")
    for name, gains in CURVES.items():
        curve = Curve.from_gains(gains)
        for load in (0.3, 0.6, 0.9, 1.5, 2.2):
            for policy in POLICIES:
                mean, p99, rate = measure(policy, curve, load, options.jobs, options.seed)
                print(f"| {name} | {load} | {policy} | {mean:.2f} | {p99:.2f} | {rate:.3f} |")


if __name__ == "__main__":
    main()
