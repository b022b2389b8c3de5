"""What simulated workers claim: by the order of the queue, or as servers do that run whole batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from bench.simulator.kinds import MAX_BATCH, SimulatedJob
from bench.simulator.queue import BULK, SimulatedQueue
from bench.simulator.simulation import SimulatedWorker
from shared.queue.order import deadlines
from shared.queue.order.decision import Decision, Overtakes
from shared.queue.order.jobs import Batch, JobSelection
from shared.queue.order.joining import Joining
from shared.queue.order.signatures import SignatureOrder

WINDOW_S = 0.1


class QueueOrder:
    """The order of the queue, for workers of these models; a load counts for `load_s` in it."""

    def __init__(
        self,
        queue: SimulatedQueue,
        models: Sequence[str],
        workers: Sequence[SimulatedWorker] = (),
        load_s: float = 0.0,
    ) -> None:
        self.queue = queue
        self._models, self._workers, self._load_s = models, workers, load_s

    def add(self, job: SimulatedJob, now_s: float) -> None:
        self.queue.add(job)

    def ended(self, job: SimulatedJob, now_s: float) -> None:
        self.queue.ended(job, now_s)

    def expire(self, running: list[SimulatedJob], now_s: float) -> None:
        self.queue.expire(running, now_s)

    def start(self, worker: SimulatedWorker, now_s: float) -> list[SimulatedJob]:
        if not (kinds := {kind.name: kind for kind in self.queue.kinds()}):
            return []
        order = self._order(worker, now_s)
        for row, rows in order.candidates():
            had_turn = row.rank if row.turn == deadlines.OVERTAKEN else None
            decision = Decision(overtakes=Overtakes(order.overtaken(row, rows), had_turn))
            kind = kinds[row.signature]
            facts = self.queue.signature(kind, now_s)
            JobSelection(facts, MAX_BATCH, MAX_BATCH, order, Batch.ALONE, decision).select(order.steps())
            if jobs := self.queue.take(kind, decision):
                return jobs
        return []

    def join(self, worker: SimulatedWorker, now_s: float) -> list[SimulatedJob]:
        kind = worker.kind
        if kind is None or not any(self.queue.of_kind(kind)):
            return []
        order, facts = self._order(worker, now_s), self.queue.signature(kind, now_s)
        joining = Joining(order, facts)
        steps, _ = joining.allowed_steps()
        decision = Decision(overtakes=Overtakes(joining.overtaken))
        JobSelection(facts, worker.free_slots, MAX_BATCH, order, Batch.RUNNING, decision).select(steps)
        return self.queue.take(kind, decision)

    def wait_s(self, worker: SimulatedWorker, now_s: float) -> float | None:
        wait_ms = self._order(worker, now_s).next_ready_ms() if self.queue.kinds() else None
        return None if not wait_ms else wait_ms / 1000

    def _order(self, worker: SimulatedWorker, now_s: float) -> SignatureOrder:
        loaded = [other.model for other in self._workers if other is not worker]
        holders = {model: loaded.count(model) for model in self._models} if self._load_s else {}
        load_ms = {model: 0 if model == worker.model else round(1000 * self._load_s) for model in self._models}
        return SignatureOrder(self.queue.facts(now_s, self._models, holders), load_ms, BULK)


Choose = Callable[[deque[SimulatedJob], float], tuple[list[SimulatedJob], float]]
"""Removes the jobs of a batch from the queue; without any, returns until when to wait."""


class WholeBatches:
    """A server whose batches run as long as their longest job, and which no job joins."""

    def __init__(self, choose: Choose) -> None:
        self._queue, self._choose = deque[SimulatedJob](), choose
        self._start_s = 0.0

    def add(self, job: SimulatedJob, now_s: float) -> None:
        self._queue.append(job)

    def ended(self, job: SimulatedJob, now_s: float) -> None:
        """Nothing is learned."""

    def expire(self, running: list[SimulatedJob], now_s: float) -> None:
        """No job has a deadline."""

    def start(self, worker: SimulatedWorker, now_s: float) -> list[SimulatedJob]:
        if not self._queue:
            return []
        batch, self._start_s = self._choose(self._queue, now_s)
        for job in batch:
            job.steps_left = max(job.arrival.steps for job in batch)
        return batch

    def join(self, worker: SimulatedWorker, now_s: float) -> list[SimulatedJob]:
        return []

    def wait_s(self, worker: SimulatedWorker, now_s: float) -> float | None:
        return self._start_s - now_s if self._queue else None


def one_at_a_time(queue: deque[SimulatedJob], now_s: float) -> tuple[list[SimulatedJob], float]:
    return [queue.popleft()], now_s


def fixed_window(queue: deque[SimulatedJob], now_s: float) -> tuple[list[SimulatedJob], float]:
    """Wait up to a window from the arrival of the first job for a full batch of its signature."""
    matching = [job for job in queue if job.kind is queue[0].kind][:MAX_BATCH]
    window_end_s = queue[0].arrival.at_s + WINDOW_S
    if len(matching) < MAX_BATCH and now_s < window_end_s:
        return [], window_end_s
    for job in matching:
        queue.remove(job)
    return matching, now_s


def strict_fifo(queue: deque[SimulatedJob], now_s: float) -> tuple[list[SimulatedJob], float]:
    """Take jobs from the head while their signature is that of the first one."""
    batch = [queue.popleft()]
    while queue and len(batch) < MAX_BATCH and queue[0].kind is batch[0].kind:
        batch.append(queue.popleft())
    return batch, now_s
