"""`python -m bench.queue.deadlines`: deadlines met, ordered by slack and by priority and age.

Jobs of one priority and of two signatures, with 20 to 40 steps, at 0.8 of what a worker with full batches sustains:
single ones with a tight deadline, and bursts with a loose one or none. In simulated time, with the cost curves of
`bench.simulate`, the queue's own functions decide readiness, latest starts, turns and the order of signatures. By
priority and age the same jobs are queued without their deadlines, at which they are stopped. `--processes` runs jobs of
the demo model through `fusequeue up` instead. `--json FILE` saves the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import statistics
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lupa import lua51

from bench.common import record
from bench.queue.deadline_mix import LOOSE, TIGHT, DeadlineMix, share
from bench.queue.deadlines_over_http import measure_processes
from bench.simulate import (
    CURVES,
    MAX_BATCH,
    OVERDUE_S,
    STEP_S,
    STEPS,
    ArrivalRates,
    ArrivingJob,
    Curve,
    curve_of,
    seconds_at,
)
from shared.autoscaling.efficient_rows import efficient_rows
from shared.queue.order import deadlines
from shared.queue.order.signatures import Row

AGING_S = 30.0
LUA = Path("shared/queue/lua")
SOURCES = tuple(LUA / name for name in ("deadlines/device_times.lua", "deadlines/latest_start.lua"))


@dataclass
class DatedJob(ArrivingJob):
    """A job that is to end by `deadline_s`; `start_by_s` is its latest start, None once that has passed.

    It is in its lane since `in_lane_s`. Its forwards take `run_s`, its share of the shortest one `least_s`.
    """

    deadline_s: float | None = None
    start_by_s: float | None = None
    in_lane_s: float = 0.0
    run_s: float = 0.0
    least_s: float = math.inf
    overtaken: int = 0

    @property
    def met(self) -> bool:
        return self.deadline_s is not None and 0 < self.end_s <= self.deadline_s


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


class QueueDecisions:
    """The queue's order by slack; what it learns of device times is run from its Lua sources."""

    def __init__(self) -> None:
        self._lua = lua51.LuaRuntime()
        text = "\n".join(path.read_text("utf-8") for path in SOURCES)
        names = ("device_times.after", "device_times.means", "device_times.bound", "latest_start.of")
        self._after, self._means, self._bound, self._of = self._lua.execute(f"{text}\nreturn {', '.join(names)}")
        self._known: dict[int, Any] = {}

    def learn(self, job: DatedJob, now_s: float) -> None:
        run, least = 1000 * job.run_s, 1000 * job.least_s
        times = {"step": run / job.steps, "rest": 0, "run": run, "least_step": least}
        self._known[job.signature] = self._after(self._of_signature(job), self._lua.table_from(times), 1000 * now_s)

    def run_s(self, signature: int, now_s: float) -> float:
        means = self._means(self._known.get(signature) or self._lua.table(), 1000 * now_s)
        return float(means[0] if isinstance(means, tuple) else means) / 1000

    def latest_start(self, job: DatedJob, deadline_s: float, now_s: float) -> float:
        means = self._means(self._of_signature(job), 1000 * now_s)
        step_ms = means[1] if isinstance(means, tuple) else None
        return float(self._of(1000 * deadline_s, step_ms, job.steps)) / 1000

    def is_missed(self, job: DatedJob, now_s: float) -> bool:
        least_s = float(self._bound(self._of_signature(job), job.steps, 1000 * now_s)) / 1000
        return job.deadline_s is not None and job.deadline_s - least_s <= now_s

    def _of_signature(self, job: DatedJob) -> Any:
        return self._known.get(job.signature) or self._lua.table()

    def turn(self, since_s: float, start_by_s: float | None, overtaken: int, now_s: float) -> int:
        start_by = None if start_by_s is None else round(1000 * start_by_s)
        return deadlines.turn(start_by=start_by, overtaken=overtaken, aged=since_s <= now_s - AGING_S)


class DeadlineServer:
    """One worker and its queue; without `by_slack`, jobs go by age and stop at their deadlines."""

    def __init__(self, jobs: Sequence[DatedJob], curve: Curve, by_slack: bool) -> None:
        self._arriving, self._curve, self._by_slack = deque(jobs), curve, by_slack
        self._rows = efficient_rows(dict(curve), MAX_BATCH)
        self._rates, self._queue_decisions = ArrivalRates(), QueueDecisions()
        self._queued: dict[int, list[DatedJob]] = {}
        self._running: list[DatedJob] = []
        self._overtaken: dict[int, int] = {}
        self._now = 0.0

    def run(self) -> None:
        while self._arriving or self._running or any(self._queued.values()):
            self._arrive()
            self._expire()
            self._admit()
            if self._running:
                self._step()
            elif times := list(self._next_times()):
                self._now = min(times)

    def _arrive(self) -> None:
        while self._arriving and self._arriving[0].arrival_s <= self._now:
            job = self._arriving.popleft()
            self._rates.add(job)
            job.in_lane_s = job.arrival_s
            if self._by_slack and job.deadline_s is not None:
                job.start_by_s = self._queue_decisions.latest_start(job, job.deadline_s, self._now)
            self._queued.setdefault(job.signature, []).append(job)

    def _expire(self) -> None:
        def ends(job: DatedJob) -> bool:
            if self._by_slack:
                return self._queue_decisions.is_missed(job, self._now)
            return job.deadline_s is not None and job.deadline_s <= self._now

        for signature, queued in self._queued.items():
            left = [job for job in queued if not ends(job)]
            late = [job for job in left if job.start_by_s is not None and job.start_by_s <= self._now]
            for job in late:
                job.start_by_s, job.in_lane_s = None, self._now
            self._queued[signature] = [job for job in left if job not in late] + late if late else left
        self._running = [job for job in self._running if not (job.deadline_s or math.inf) <= self._now]

    def _ready(self) -> Iterator[tuple[float, int]]:
        for signature, queued in self._queued.items():
            if queued:
                yield self._rates.ready_at(queued, self._now, self._rows, _least(queued, lead_s=1.0)), signature

    def _rows_of(self, ready: Sequence[tuple[float, int]]) -> dict[int, Row]:
        rows = {}
        for at, signature in ready:
            least, at_ms = _least(self._queued[signature]), 1000 * at
            rows[signature] = Row(
                str(signature),
                "model",
                rank=1,
                ready_ms=at_ms,
                sort_ms=at_ms,
                free_ms=at_ms,
                load_justified=True,
                turn=self._queue_decisions.turn(at, least, self._overtaken.get(signature, 0), self._now),
                start_by=None if least is None else round(1000 * least),
            )
        return rows

    def _first(self, ready: Sequence[tuple[float, int]]) -> int:
        """Return the ready signature that a worker claims."""
        rows = self._rows_of(ready)
        return min(rows, key=lambda signature: rows[signature].key)

    def _admit(self) -> None:
        ready = [(at, signature) for at, signature in self._ready() if at <= self._now]
        if self._running:
            own = self._running[0].signature
            due = [(at, signature) for at, signature in ready if signature == own or self._is_due(at, signature, own)]
            if not due or all(signature == own for _, signature in due):
                self._take(own)
            elif self._first(due) == own:
                self._take_first(own, due)
        elif ready:
            self._take_first(self._first(ready), ready)

    def _is_due(self, ready_s: float, signature: int, own: int) -> bool:
        least = _least(self._queued[signature])
        urgent = least is not None and least <= self._now + self._queue_decisions.run_s(own, self._now)
        return urgent or ready_s <= self._now - OVERDUE_S

    def _take_first(self, signature: int, ready: Sequence[tuple[float, int]]) -> None:
        rows = self._rows_of(ready)
        taken = self._take(signature)
        if rows[signature].turn == deadlines.OVERTAKEN:
            self._overtaken[signature] = 0
        for other, row in rows.items():
            aged = row.sort_ms <= 1000 * (self._now - AGING_S)
            if taken and rows[signature].turn == deadlines.DATED and row.turn == deadlines.UNDATED and aged:
                self._overtaken[other] = self._overtaken.get(other, 0) + 1

    def _take(self, signature: int) -> int:
        queued, taken = self._queued.get(signature, []), 0
        while queued and len(self._running) < self._rows:
            job = self._next(queued)
            queued.remove(job)
            self._running.append(job)
            taken += 1
        return taken

    def _next(self, queued: list[DatedJob]) -> DatedJob:
        """Return the job of a lane that is claimed first."""
        head = next((job for job in queued if job.start_by_s is None), None)
        dated = min((job for job in queued if job.start_by_s is not None), key=_start_by, default=None)
        if head is None or dated is None:
            return head or dated or queued[0]
        if self._queue_decisions.turn(head.in_lane_s, None, head.overtaken, self._now) == deadlines.OVERTAKEN:
            return head
        head.overtaken += head.in_lane_s <= self._now - AGING_S
        return dated

    def _step(self) -> None:
        seconds, rows = seconds_at(self._curve, len(self._running)), len(self._running)
        self._now += seconds
        for job in self._running:
            job.steps_left -= 1
            job.run_s, job.least_s = job.run_s + seconds, min(job.least_s, seconds / rows)
            if not job.steps_left:
                job.end_s = self._now
                self._queue_decisions.learn(job, self._now)
        self._running = [job for job in self._running if job.steps_left]

    def _next_times(self) -> Iterator[float]:
        for at, signature in self._ready():
            ends = [by for job in self._queued[signature] if (by := job.start_by_s or job.deadline_s) is not None]
            yield min([max(at, self._now + 1e-6), *(max(by, self._now + 1e-6) for by in ends)])
        if self._arriving:
            yield self._arriving[0].arrival_s


def _start_by(job: DatedJob) -> float:
    return math.inf if job.start_by_s is None else job.start_by_s


def _least(queued: Sequence[DatedJob], lead_s: float = 0.0) -> float | None:
    """Return the least latest start, `lead_s` earlier; None without deadlines."""
    least = min(map(_start_by, queued), default=math.inf)
    return None if least == math.inf else least - lead_s


def job_seconds(curve: Curve) -> float:
    """Return the mean time of a job in full batches of the efficient rows."""
    return seconds_at(curve, efficient_rows(dict(curve), MAX_BATCH)) * statistics.mean(STEPS)


def dated_jobs(curve: Curve, mix: DeadlineMix) -> list[DatedJob]:
    rng, rows = random.Random(mix.seed), efficient_rows(dict(curve), MAX_BATCH)
    jobs = []
    for at_s, limit_s in mix.arrivals(rows / job_seconds(curve), rows):
        signature, steps = 0 if rng.random() < 0.7 else 1, rng.choice(STEPS)
        jobs.append(DatedJob(at_s, signature, steps, deadline_s=None if limit_s is None else at_s + limit_s))
    return jobs


def simulate(name: str, mix: DeadlineMix, by_slack: bool) -> DeadlineFigures:
    curve = curve_of(CURVES[name])
    jobs = dated_jobs(curve, mix)
    DeadlineServer(jobs, curve, by_slack).run()
    middle_s = job_seconds(curve) * (TIGHT + LOOSE) / 2
    limits = [(job.met, job.deadline_s - job.arrival_s) for job in jobs if job.deadline_s is not None]
    waits = sorted(job.end_s - job.arrival_s for job in jobs if job.deadline_s is None)
    return DeadlineFigures(
        curve=name,
        order="slack" if by_slack else "priority and age",
        load=mix.load,
        met=share(met for met, _ in limits),
        tight_met=share(met for met, limit_s in limits if limit_s < middle_s),
        loose_met=share(met for met, limit_s in limits if limit_s > middle_s),
        without_mean_s=round(statistics.mean(waits), 2) if waits else None,
        without_p99_s=round(waits[int(0.99 * len(waits))], 2) if waits else None,
    )


def main(argv: list[str] | None = None) -> None:
    """Measure both orders, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, help="default: 6000 simulated, 1200 in each turn of processes")
    parser.add_argument("--load", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    mix = DeadlineMix(options.load, options.jobs or (1200 if options.processes else 6000), options.seed)
    if options.processes:
        with tempfile.TemporaryDirectory(prefix="fusequeue-bench-") as folder:
            figures = asyncio.run(measure_processes(Path(folder), mix))
    else:
        figures = [asdict(simulate(name, mix, by_slack)) for name in CURVES for by_slack in (False, True)]
    for row in figures:
        print(row)
    if options.json:
        record.write(options.json, {"results": figures}, step_ms=1000 * STEP_S, tight=TIGHT, loose=LOOSE)


if __name__ == "__main__":
    main()
