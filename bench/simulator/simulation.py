"""Workers in simulated time: they claim jobs by a policy, which join and leave their batches."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from bench.simulator.clock import Clock
from bench.simulator.kinds import Arrival, JobKind, SimulatedJob

LEAST_WAIT_S = 1e-6
EPSILON_STEPS = 1e-6


@dataclass(eq=False)
class SimulatedWorker:
    """A worker that runs jobs of one signature at a time; its model is loaded at `ready_s`."""

    model: str | None = None
    ready_s: float = 0.0
    running: list[SimulatedJob] = field(default_factory=list)
    at_s: float = 0.0
    version: int = 0  # outdated events have an older one
    reserved: int = 0  # slots kept for jobs of another worker

    @property
    def kind(self) -> JobKind | None:
        """The signature that runs."""
        return self.running[0].kind if self.running else None

    @property
    def forward_s(self) -> float:
        return self.running[0].kind.forward_s(len(self.running)) if self.running else 0.0

    @property
    def free_slots(self) -> int:
        """Free slots of the running batch."""
        return self.running[0].kind.rows - len(self.running) - self.reserved if self.running else 0

    def advance(self, now_s: float) -> list[SimulatedJob]:
        """Run until `now_s`; return the jobs that have ended."""
        elapsed_s, forward_s, rows = now_s - max(self.at_s, self.ready_s), self.forward_s, len(self.running)
        self.at_s = now_s
        if not rows or elapsed_s <= 0:
            return []
        forwards = elapsed_s / forward_s
        for job in self.running:
            job.steps_left -= forwards
            job.run_s += elapsed_s
            job.gpu_s += elapsed_s / rows
            job.forward_rows += forwards * rows
            job.least_s = min(job.least_s, forward_s / rows)
        ended = [job for job in self.running if job.steps_left < EPSILON_STEPS]
        self.running = [job for job in self.running if job.steps_left >= EPSILON_STEPS]
        return ended


class Policy(Protocol):
    """What workers claim."""

    def add(self, job: SimulatedJob, now_s: float) -> None:
        """Queue a job."""

    def start(self, worker: SimulatedWorker, now_s: float) -> list[SimulatedJob]:
        """Return the jobs of a new batch."""

    def join(self, worker: SimulatedWorker, now_s: float) -> list[SimulatedJob]:
        """Return jobs that join the batch of a worker with free slots."""

    def wait_s(self, worker: SimulatedWorker, now_s: float) -> float | None:
        """Return after how long an idle worker can start jobs; None without queued ones."""

    def ended(self, job: SimulatedJob, now_s: float) -> None:
        """Note that a job has ended."""

    def expire(self, running: list[SimulatedJob], now_s: float) -> None:
        """Stop jobs at their deadlines, queued ones and those of a worker."""


class Simulation:
    """Workers and the jobs that arrive for them.

    `by_step`: jobs join at the end of a forward; otherwise at once, and forwards are not counted one by one, which does
    where loads take as long as hundreds of them. A worker that has another model in memory loads for `load_s`.
    """

    def __init__(
        self, policy: Policy, workers: Sequence[SimulatedWorker] = (), *, by_step: bool = False, load_s: float = 0.0
    ) -> None:
        self.clock = Clock()
        self.jobs: list[SimulatedJob] = []
        self.loads = 0
        self._policy, self._workers, self._by_step, self._load_s = policy, workers, by_step, load_s
        self._arrivals: deque[Arrival] = deque()

    @property
    def workers(self) -> Sequence[SimulatedWorker]:
        """Workers that can claim jobs."""
        return self._workers

    def run(self, arrivals: Sequence[Arrival], until_s: float = math.inf) -> None:
        """Simulate jobs in the order of their arrival until `until_s`, or until all have ended."""
        self._arrivals = deque(arrivals)
        self._expect_arrival()
        self.begin()
        self.clock.run(until_s)

    def begin(self) -> None:
        """Schedule the first events beside arrivals."""

    def job_ended(self, job: SimulatedJob) -> None:
        self._policy.ended(job, self.clock.now_s)

    def forward_ended(self, worker: SimulatedWorker) -> None:
        """Change the batch of a worker between two forwards, before it claims jobs."""

    def serve_all(self) -> None:
        for worker in self.workers:
            if not worker.running or (worker.free_slots > 0 and not self._by_step):
                self.serve(worker)

    def serve(self, worker: SimulatedWorker) -> None:
        """Advance a worker to now, let it claim jobs, and schedule its next event."""
        now_s = self.clock.now_s
        if worker.ready_s > now_s:
            return
        for job in worker.advance(now_s):
            job.end_s = now_s
            self.job_ended(job)
        self._policy.expire(worker.running, now_s)
        self.forward_ended(worker)
        if not worker.running:
            self._start(worker, self._policy.start(worker, now_s))
        elif worker.free_slots > 0:
            self._start(worker, self._policy.join(worker, now_s))
        worker.version += 1
        if worker.running:
            forwards = 1 if self._by_step else min(job.steps_left for job in worker.running)
            self._serve_at(max(worker.ready_s, now_s) + forwards * worker.forward_s, worker)
        elif (wait_s := self._policy.wait_s(worker, now_s)) is not None:
            self._serve_at(now_s + max(wait_s, LEAST_WAIT_S), worker)

    def _expect_arrival(self) -> None:
        if self._arrivals:
            self.clock.at(self._arrivals[0].at_s, self._arrive)

    def _arrive(self) -> None:
        now_s = self.clock.now_s
        while self._arrivals and self._arrivals[0].at_s <= now_s:
            job = SimulatedJob(len(self.jobs), self._arrivals.popleft())
            self.jobs.append(job)
            self._policy.add(job, now_s)
        self._expect_arrival()
        self.serve_all()

    def _start(self, worker: SimulatedWorker, jobs: list[SimulatedJob]) -> None:
        now_s = self.clock.now_s
        if jobs and self._load_s and worker.model != jobs[0].kind.model:
            self.loads += 1
            worker.model, worker.ready_s = jobs[0].kind.model, now_s + self._load_s
            self.clock.at(worker.ready_s, lambda: self.serve(worker))
        for job in jobs:
            job.start_s = max(now_s, worker.ready_s) if job.start_s is None else job.start_s
        worker.running += jobs

    def _serve_at(self, when_s: float, worker: SimulatedWorker) -> None:
        version = worker.version

        def event() -> None:
            if version == worker.version:
                self.event_of(worker)

        self.clock.at(when_s, event)

    def event_of(self, worker: SimulatedWorker) -> None:
        """Serve a worker after a forward, the end of a job or a wait."""
        self.serve(worker)
