"""Rounds of a worker's and a client's operations on a full queue, each measured by the server."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bench.queue.filling import MODEL, JobSource, Level, submit
from bench.queue.private_redis import MeasuredClient, ScriptCost
from shared.job import Phase, State
from shared.job_record import Artifact, Outcome, Progress
from shared.queue import Claim, ProgressReport, Queue, Submission, WorkerInfo

SLOTS, MORE_SLOTS = 8, 4
WORKERS = 64
WARM_ROUNDS = 20
MODELS = {MODEL: 0}


@dataclass
class Measurements:
    """The costs of scripts by operation, at one level."""

    costs: defaultdict[str, list[ScriptCost]] = field(default_factory=lambda: defaultdict(list))
    claimed: list[int] = field(default_factory=list)

    def clear(self) -> None:
        self.costs.clear()
        self.claimed.clear()


class Rounds:
    """Runs rounds of operations that leave the number of queued jobs as it was."""

    def __init__(self, queue: Queue, client: MeasuredClient, source: JobSource, level: Level, ids: list[str]) -> None:
        self._queue = queue
        self._client = client
        self._source = source
        self._level = level
        self._ids = ids
        self._random = random.Random(level.jobs)
        self._number = 0
        self.measured = Measurements()

    async def warm_up(self) -> None:
        await self.run(WARM_ROUNDS)
        self.measured.clear()

    async def run(self, rounds: int) -> None:
        for _ in range(rounds):
            self._number += 1
            await self._round(f"worker-{self._number % WORKERS}")

    async def _cost(self, name: str, call: Callable[[], Awaitable[Any]]) -> Any:
        """Run one operation and keep the cost of its scripts together under `name`."""
        result, costs = await self._client.measured(call)
        if costs:
            spent = ScriptCost(name, sum(one.microseconds for one in costs), sum(one.commands for one in costs))
            self.measured.costs[name].append(spent)
        return result

    async def _round(self, worker: str) -> None:
        queue, cost = self._queue, self._cost
        job = self._source.job(self._level)
        await cost("submit", lambda: submit(queue, [job]))
        self._remember(job)
        await cost("next_ready_ms", lambda: queue.claims.next_ready_ms(MODELS, worker=worker))
        claims: list[Claim] = await cost("claim", lambda: queue.claims.claim(worker, MODELS, SLOTS))
        if len(claims) < SLOTS:  # a batch of fewer jobs costs less: not comparable
            self.measured.costs["claim"].pop()
        self.measured.claimed.append(len(claims))
        if claims:
            claims = claims + await self._join(worker, claims[0].signature)
        epochs = {one.job.id: one.epoch for one in claims}
        await cost("renew", lambda: queue.claims.renew(worker, epochs))
        reports = [ProgressReport(one.job.id, one.epoch, Phase.DENOISING, Progress(step=3, total=28)) for one in claims]
        await cost("report_progress", lambda: queue.claims.report_progress(*reports))
        released = claims.pop() if len(claims) > 1 else None
        if released is not None:
            await cost("release", lambda: queue.claims.release(worker, {released.job.id: released.epoch}))
        for one in claims:
            await cost("settle", partial(queue.claims.settle, worker, one.job.id, one.epoch, outcome(one)))
        canceled = await self._read_and_cancel()
        await self._upkeep(worker)
        lost = len(claims) + canceled - 1
        jobs = [self._source.job(self._level) for _ in range(lost)]
        if jobs:
            await submit(queue, jobs)
        for job in jobs:
            self._remember(job)

    def _remember(self, job: Submission) -> None:
        """Make a job one of those that are read and canceled, in the place of another."""
        self._ids[self._random.randrange(len(self._ids))] = job.job.id

    async def _join(self, worker: str, signature: str) -> list[Claim]:
        def call() -> Awaitable[list[Claim]]:
            return self._queue.claims.join(worker, signature, MORE_SLOTS, models=MODELS)

        joined: list[Claim] = await self._cost("join", call)
        return joined

    async def _read_and_cancel(self) -> int:
        """Read the position of a job, and cancel one; return how many were queued."""
        read = self._random.choice(self._ids)
        position, costs = await self._client.measured(lambda: self._queue.jobs.position(read))
        if position is not None:
            self.measured.costs["queue_position"] += costs
        for canceled in self._random.sample(self._ids, min(20, len(self._ids))):
            before = await self._queue.jobs.get(canceled)
            if before is not None and before.state is State.QUEUED:
                await self._cost("cancel_jobs", partial(self._queue.jobs.cancel, canceled))
                return 1
        return 0

    async def _upkeep(self, worker: str) -> None:
        maintenance = self._queue.maintenance
        await self._cost("heartbeat", lambda: self._queue.workers.heartbeat(WorkerInfo(worker, (MODEL,)), [MODEL]))
        await self._cost("reclaim", lambda: maintenance.reclaim(100))
        await self._cost("expire", lambda: maintenance.expire(100))
        await self._cost("expired_items", lambda: maintenance.expired_items(100))

    async def overviews(self) -> None:
        """Measure what operators and the chores call: their scripts can run long, and block the others meanwhile."""
        await self._cost("queue_depths", self._queue.workers.queue_depths)
        await self._cost("model_depths", self._queue.workers.load)
        _, costs = await self._client.measured(self._queue.maintenance.reconcile)
        for one in costs:
            self.measured.costs[one.name].append(one)


def outcome(claim: Claim) -> Outcome:
    """Return the outcome of a job with one image."""
    artifact = Artifact(
        index=0,
        key=f"jobs/{claim.job.id}/1/0.png",
        content_type="image/png",
        bytes=1_500_000,
        width=1024,
        height=1024,
        seed=7,
    )
    return Outcome(
        state=State.SUCCEEDED, artifacts=(artifact,), device_seconds=1.5, progress=Progress(step=28, total=28)
    )
