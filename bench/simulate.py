"""`python -m bench.simulate`: latency under load by batching policy, in simulated time.

Jobs arrive at random (Poisson) in two signatures, with 20 to 40 steps. The decisions are those of production: the
arrival rate of the queue's Lua prelude decides readiness, `worker.cost_curves` the efficient rows. They are compared
with three policies of other servers. A load of 1 is what a server without batching can sustain.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from lupa import lua51

from shared.autoscaling.efficient_rows import efficient_rows

STEP_S = 0.05
WINDOW_S = 0.1
OVERDUE_S = 2.0
MAX_BATCH = 8
STEPS = (20, 28, 40)
# Published speedups of batching, one GPU, Qwen-Image: images per second by rows, relative to one row.
CURVES = {
    "512": {1: 1.0, 2: 1.8, 4: 2.8, 8: 3.1},
    "1024": {1: 1.0, 2: 1.02, 4: 1.02, 8: 1.02},
}


@dataclass
class ArrivingJob:
    arrival_s: float
    signature: int
    steps: int
    steps_left: int = field(init=False)
    end_s: float = 0.0

    def __post_init__(self) -> None:
        self.steps_left = self.steps


Curve: TypeAlias = Mapping[int, float]
"""Seconds per forward by rows."""


def curve_of(gains: Mapping[int, float]) -> Curve:
    """Return the cost curve of speedups by rows."""
    return {rows: STEP_S * rows / gain for rows, gain in gains.items()}


def seconds_at(curve: Curve, rows: int) -> float:
    """Interpolate a cost curve linearly; constant above its last point."""
    below = max(known for known in curve if known <= rows)
    above = min((known for known in curve if known >= rows), default=below)
    share = 0.0 if above == below else (rows - below) / (above - below)
    return curve[below] + share * (curve[above] - curve[below])


def arrivals(load: float, count: int, seed: int) -> list[ArrivingJob]:
    """Return `count` jobs at `load` times the rate that a server without batching sustains."""
    rng = random.Random(seed)
    rate = load / (STEP_S * statistics.mean(STEPS))
    jobs, now = [], 0.0
    for _ in range(count):
        now += rng.expovariate(rate)
        jobs.append(ArrivingJob(now, 0 if rng.random() < 0.7 else 1, rng.choice(STEPS)))
    return jobs


def run_batches(
    jobs: list[ArrivingJob],
    curve: Curve,
    choose: Callable[[deque[ArrivingJob], float], tuple[list[ArrivingJob], float]],
) -> None:
    """Run whole batches: `choose` removes jobs from the queue and returns their start; all end with the longest."""
    arriving, queue, now = deque(jobs), deque[ArrivingJob](), 0.0
    while arriving or queue:
        if not queue:
            now = max(now, arriving[0].arrival_s)
        while arriving and arriving[0].arrival_s <= now:
            queue.append(arriving.popleft())
        batch, start = choose(queue, now)
        if not batch:
            now = min(start, arriving[0].arrival_s) if arriving else start
            continue
        now = max(now, start) + seconds_at(curve, len(batch)) * max(job.steps for job in batch)
        for job in batch:
            job.end_s = now


def one_at_a_time(queue: deque[ArrivingJob], now: float) -> tuple[list[ArrivingJob], float]:
    return [queue.popleft()], now


def fixed_window(queue: deque[ArrivingJob], now: float) -> tuple[list[ArrivingJob], float]:
    """Wait up to a window from the arrival of the first job for a full batch of its signature."""
    head = queue[0]
    matching = [job for job in queue if job.signature == head.signature][:MAX_BATCH]
    window_end = head.arrival_s + WINDOW_S
    if len(matching) < MAX_BATCH and now < window_end:
        return [], window_end
    for job in matching:
        queue.remove(job)
    return matching, now


def strict_fifo(queue: deque[ArrivingJob], now: float) -> tuple[list[ArrivingJob], float]:
    """Take jobs from the head while their signature is that of the first one."""
    batch = [queue.popleft()]
    while queue and len(batch) < MAX_BATCH and queue[0].signature == batch[0].signature:
        batch.append(queue.popleft())
    return batch, now


class ArrivalRates:
    """The queue's readiness decision, run from its Lua source."""

    def __init__(self) -> None:
        self._lua = lua51.LuaRuntime()
        text = Path("shared/queue/lua/lib/readiness.lua").read_text()
        self._functions: Any = self._lua.execute(text + "\nreturn readiness")
        self._last: dict[int, float] = {}
        self._gap: dict[int, float | None] = {}

    def add(self, job: ArrivingJob) -> None:
        last = self._last.get(job.signature)
        gap = None if last is None else 1000 * (job.arrival_s - last)
        self._gap[job.signature] = self._functions.next_gap(self._gap.get(job.signature), gap, 1000 * WINDOW_S)
        self._last[job.signature] = job.arrival_s

    def ready_at(
        self, queued: Sequence[ArrivingJob], now: float, efficient_rows: int, start_by: float | None = None
    ) -> float:
        """Return when these jobs of one signature are ready, in seconds; one of them must start by `start_by`."""
        state = {
            "now": 1000 * now,
            "oldest": 1000 * min(job.arrival_s for job in queued),
            "slots": len(queued),
            "efficient_rows": efficient_rows,
            "window": 1000 * WINDOW_S,
            "gap": self._gap.get(queued[0].signature),
            "start_by": None if start_by is None else 1000 * start_by,
        }
        return float(self._functions.ready_at(self._lua.table_from(state))) / 1000


class Continuous:
    """fusequeue's policy: ready signatures start, jobs join and leave at any step, overdue ones stop admissions."""

    def __init__(self, jobs: list[ArrivingJob], curve: Curve) -> None:
        self._arriving = deque(jobs)
        self._curve = curve
        self._rows = efficient_rows(dict(curve), MAX_BATCH)
        self._rates = ArrivalRates()
        self._queued: dict[int, list[ArrivingJob]] = {}
        self._running: list[ArrivingJob] = []
        self._now = 0.0

    def run(self) -> None:
        while self._arriving or self._running or any(self._queued.values()):
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
        while self._arriving and self._arriving[0].arrival_s <= self._now:
            job = self._arriving.popleft()
            self._rates.add(job)
            self._queued.setdefault(job.signature, []).append(job)

    def _ready(self) -> Iterator[tuple[float, int]]:
        for signature, queued in self._queued.items():
            if queued:
                yield self._rates.ready_at(queued, self._now, self._rows), signature

    def _start(self) -> None:
        ready = sorted(entry for entry in self._ready() if entry[0] <= self._now)
        if ready:
            self._admit(ready[0][1])

    def _join(self) -> None:
        running = self._running[0].signature
        if all(self._now - at <= OVERDUE_S for at, signature in self._ready() if signature != running):
            self._admit(running)

    def _admit(self, signature: int) -> None:
        queued = self._queued.get(signature, [])
        free = self._rows - len(self._running)
        self._running += queued[:free]
        del queued[:free]

    def _step(self) -> None:
        self._now += seconds_at(self._curve, len(self._running))
        for job in self._running:
            job.steps_left -= 1
            if not job.steps_left:
                job.end_s = self._now
        self._running = [job for job in self._running if job.steps_left]

    def _next_times(self) -> list[float]:
        times = [max(at, self._now + 1e-6) for at, _ in self._ready()]
        return [*times, self._arriving[0].arrival_s] if self._arriving else times


POLICIES: dict[str, Callable[[list[ArrivingJob], Curve], None]] = {
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


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    print(
        f"{options.jobs} jobs, steps {STEPS}, {STEP_S * 1000:.0f} ms per step of one row, "
        f"window {WINDOW_S * 1000:.0f} ms\n"
    )
    print("| curve | load | policy | mean s | p99 s | jobs/s |\n|---|---|---|---|---|---|")
    for name, gains in CURVES.items():
        curve = curve_of(gains)
        for load in (0.3, 0.6, 0.9, 1.5, 2.2):
            for policy in POLICIES:
                mean, p99, rate = measure(policy, curve, load, options.jobs, options.seed)
                print(f"| {name} | {load} | {policy} | {mean:.2f} | {p99:.2f} | {rate:.3f} |")


if __name__ == "__main__":
    main()
