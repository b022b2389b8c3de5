"""Which jobs of a signature a worker claims.

Tenants take turns, the least-served one first. In its turn a tenant's released and skipped jobs go before those with a
deadline, and these before the stream of its lane. A lost job runs by itself.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from shared.queue.order import deadlines
from shared.queue.order.decision import ChosenJob, Decision
from shared.queue.order.facts import LaneFacts, LostJob, QueuedJob, SignatureQueue
from shared.queue.order.policies import Limit
from shared.queue.order.signatures import Blocked, Part, SignatureOrder, Step

MOST_REMOVED = 32
"""Jobs that a claim removes from their place; ending one takes about 25 commands of Redis."""

MOST_SKIPPED = 4
"""Jobs of a lane that need more slots than are left, after which its turn ends."""


class Batch(Enum):
    """What jobs are selected for."""

    ALONE = "a batch of a worker without jobs"
    BESIDE = "a new batch beside running jobs"
    RUNNING = "a running batch"


@dataclass
class Turn:
    """A tenant's turn: the jobs of its lane that are left."""

    lane: LaneFacts
    returned: deque[QueuedJob]
    stream: deque[QueuedJob]
    skipped: int = 0
    has_removed: bool = False
    yielded: str | None = None
    """The job with a deadline before which a job of the stream had its turn."""


@dataclass
class JobSelection:
    """Selects jobs of a signature for the free `slots` of a worker, which has `capacity` when it runs nothing.

    Beside others no lost job starts.
    """

    queue: SignatureQueue
    slots: int
    capacity: int
    order: SignatureOrder
    batch: Batch
    decision: Decision = field(default_factory=Decision)
    held: bool = False
    """The slots that are left are kept free for a skipped job."""

    blocked: dict[tuple[str, int], Blocked] = field(default_factory=dict)
    """By tenant and rank, the smallest job that its tenant's limit did not let start, or an overdue one."""

    def __post_init__(self) -> None:
        self._left = self.slots
        self._empty_worker_slots = self.slots if self.batch is Batch.ALONE else 0
        self._claimed: Counter[str] = Counter()
        self._overtaken: Counter[str] = Counter()

    def select(self, steps: Sequence[Step]) -> Decision:
        """Select jobs of the parts of `steps`, in this order."""
        parts = [step.parts for step in steps if self.queue.model in step.models]
        ranks = list(dict.fromkeys(part.rank for step in parts for part in step))
        if self.batch is not Batch.RUNNING:
            self._left = self._slots_to_start(ranks)
        if self.batch is Batch.ALONE and self._select_lost(ranks):
            return self.decision
        for step in parts:
            if self._left <= 0 or self.held:
                break
            self._share(step)
        return self.decision

    def _slots_to_start(self, ranks: Sequence[int]) -> int:
        """Return the slots of a new batch: at most the model's maximum and the efficient rows.

        If a job needs several slots, efficient rows are no limit: the job could never start.
        """
        most = min(self._left, self.queue.max_batch or self._left)
        if not self._has_single_slots(ranks):
            return most
        return min(most, self.queue.efficient_rows or most)

    def _has_single_slots(self, ranks: Sequence[int]) -> bool:
        return all(self.queue.jobs[rank] == self.queue.slots[rank] for rank in ranks)

    # Lost jobs

    def _select_lost(self, ranks: Sequence[int]) -> bool:
        """Select the first lost job, to run solo, if it is next; return whether that decides the batch."""
        for place, rank in enumerate(ranks):
            lost = self._first_lost(rank)
            if lost is not None:
                if self._fits(lost.job):
                    self._take(lost.job, rank)
                    return True
                self._skip(lost.job)
                return self.held
            if self.queue.jobs[rank] > 0 and not any(map(self._is_lost_overdue, ranks[place + 1 :])):
                return False
        return False

    def _first_lost(self, rank: int) -> LostJob | None:
        """Return the first lost job that its tenant's limit allows, of the least-served tenant."""
        allowed = []
        for lost in self.queue.lost:
            if lost.rank != rank:
                continue
            if lost.job.loses_place:
                self._remove(lost.job)
            elif self._allows(lost.limit, lost.rank, lost.job):
                allowed.append(lost)
            else:
                self._let_pass(lost.limit, lost.rank, lost.job)
        return min(allowed, key=lambda lost: lost.usage, default=None)

    def _is_lost_overdue(self, rank: int) -> bool:
        since = lost_since(self.queue, rank)
        return since is not None and self.queue.now_ms - since > self.order.facts.policies.overdue_ms

    # Turns

    def _share(self, parts: Sequence[Part]) -> None:
        """Share the slots that are left among the tenants with queued jobs of the parts of a step."""
        queued = [part for part in parts if self.queue.jobs[part.rank] > 0]
        single = self._has_single_slots([part.rank for part in queued])
        for turns in self._rounds(queued):
            active = turns
            while active and self._left > 0 and not self.held:
                share = max(1, self._left // len(active)) if single else 1
                active = [turn for turn in active if self._has_turn(turn, share)]

    def _rounds(self, parts: Sequence[Part]) -> list[list[Turn]]:
        """Return the turns by usage. A tenant with jobs in two parts has its turn of the second in a later round."""
        rounds: list[list[Turn]] = [[] for _ in parts]
        seen: Counter[str] = Counter()
        for part in parts:
            for lane in self.queue.lanes:
                if lane.rank != part.rank or not self.order.includes(part, lane.usage):
                    continue
                if lane.limit.allows(1, self._claimed[lane.tenant]):
                    rounds[seen[lane.tenant]].append(Turn(lane, deque(lane.returned), deque(lane.stream)))
                    seen[lane.tenant] += 1
                else:
                    self._block(Blocked(lane.tenant, self.queue.model, lane.rank, 1))
        for turns in rounds:
            turns.sort(key=lambda turn: turn.lane.usage)
        return rounds

    def _has_turn(self, turn: Turn, share: int) -> bool:
        if self._left <= 0 or self.held:
            return False
        return self._take_turn(turn, min(share, self._left))

    def _take_turn(self, turn: Turn, count: int) -> bool:
        """Select up to `count` jobs of a tenant; return whether there can be more."""
        enough = len(self.decision.take) + count
        if not self._take_returned(turn, enough):
            return False
        while self._wants_more(enough):
            if not self._take_from_stream(turn) or turn.skipped >= MOST_SKIPPED or self._has_removed_most():
                return False
        return self._left > 0

    def _wants_more(self, enough: int) -> bool:
        return len(self.decision.take) < enough and self._left > 0 and not self.held

    def _take_from_stream(self, turn: Turn) -> bool:
        """Select the next job of a lane's stream; return whether the turn goes on."""
        if not turn.stream:
            return False
        limit, rank, job = turn.lane.limit, turn.lane.rank, turn.stream[0]
        if not self._allows(limit, rank, job):
            if not self._let_pass(limit, rank, job):
                return False
            turn.skipped += 1
            turn.stream.popleft()
            return True
        turn.stream.popleft()
        if job.loses_place:
            self._remove(job)
        elif self._fits(job):
            self._take(job, turn.lane.rank)
        else:
            self._skip(job)
            turn.skipped += 1
        return True

    def _take_returned(self, turn: Turn, enough: int) -> bool:
        """Select released, skipped and dated jobs of a tenant until `enough` are selected.

        Return whether the turn goes on: not where its limit ends it, nor before the jobs behind those that have lost
        their place are read.
        """
        while turn.returned and self._wants_more(enough):
            job = turn.returned[0]
            if job.place == "solo":
                turn.returned.popleft()
            elif job.loses_place:
                if self._has_removed_most():
                    return True
                self._remove(turn.returned.popleft())
                turn.has_removed = True
            elif job.place == "dated" and turn.yielded != job.id and self._stream_has_turn(turn):
                turn.yielded = job.id
                if not self._take_from_stream(turn):
                    return False
            elif not self._allows(turn.lane.limit, turn.lane.rank, job):
                if turn.skipped >= MOST_SKIPPED or not self._let_pass(turn.lane.limit, turn.lane.rank, job):
                    return False
                turn.skipped += 1
                turn.returned.popleft()
            elif self._fits(turn.returned.popleft()):
                self._take(job, turn.lane.rank)
            else:
                self._skip(job)
        return bool(turn.returned) or not (turn.has_removed and turn.lane.has_more_returned)

    def _stream_has_turn(self, turn: Turn) -> bool:
        """Return whether the next job of the stream goes before one with a deadline; otherwise it is overtaken."""
        if not turn.stream:
            return False
        first = turn.stream[0]
        if first.since_ms > self.queue.now_ms - self.order.facts.policies.aging_ms:
            return False
        overtaken = first.overtaken + self._overtaken[first.id]
        if deadlines.turn(start_by=None, overtaken=overtaken, aged=True) == deadlines.OVERTAKEN:
            return True
        self._overtaken[first.id] += 1
        self.decision.overtaken_jobs.append(first.id)
        return False

    # One job

    def _allows(self, limit: Limit, rank: int, job: QueuedJob) -> bool:
        """Return whether its tenant's limit lets a job start, and no job that slots are kept for goes before it."""
        reserved = limit.reserved
        if reserved is not None and reserved.holds_back(job.id, rank):
            self._block(Blocked(job.tenant, self.queue.model, rank, reserved.slots))
            return False
        if limit.allows(job.slots, self._claimed[job.tenant]):
            return True
        self._block(Blocked(job.tenant, self.queue.model, rank, job.slots))
        return False

    def _let_pass(self, limit: Limit, rank: int, job: QueuedJob) -> bool:
        """Let others of its tenant pass a job that its limit does not let start; return whether they may.

        When it is overdue, the slots that become free are kept for it: otherwise it would never start.
        """
        if limit.holds_back(job.id, rank) or not limit.allows(1, self._claimed[job.tenant]):
            return False
        if self._is_overdue(job):
            self._block(Blocked(job.tenant, self.queue.model, rank, job.slots, job.id))
            return False
        if job.passed_ms is None or job.passed_ms > self.queue.now_ms:
            self.decision.held_up.append((job.id, job.epoch))
        return True

    def _block(self, blocked: Blocked) -> None:
        known = self.blocked.get((blocked.tenant, blocked.rank))
        if known is None or blocked.job_id or (blocked.slots < known.slots and not known.job_id):
            self.blocked[blocked.tenant, blocked.rank] = blocked

    def _fits(self, job: QueuedJob) -> bool:
        """Return whether a job fits into the slots that are left.

        As the first one of a worker without jobs it can fill all of the worker's slots: the largest batch of the
        signature is that of its last submit, which can be of another size than this job. An overdue one can need more:
        it runs in parts, as it would never start where the models' `max_batch` was lowered.
        """
        if job.slots <= self._left:
            return True
        if self.decision.take or not self._empty_worker_slots:
            return False
        return job.slots <= self._empty_worker_slots or (job.slots > self.capacity and self._is_overdue(job))

    def _take(self, job: QueuedJob, rank: int) -> None:
        self.decision.take.append(ChosenJob(job.id, job.epoch, job.place, rank, job.tenant, job.slots))
        self._claimed[job.tenant] += job.slots
        self._left -= job.slots

    def _skip(self, job: QueuedJob) -> None:
        """Pass over a job that does not fit; if it is overdue, keep the slots that are left free for it."""
        if job.place == "lane" or job.passed_ms is None or job.passed_ms > self.queue.now_ms:
            self.decision.skip.append((job.id, job.epoch))
        elif self._waits_for(job):
            self.decision.wait_for.append((job.id, job.epoch))
            self.held = True

    def _remove(self, job: QueuedJob) -> None:
        self.decision.remove.append((job.id, job.epoch))

    def _has_removed_most(self) -> bool:
        return len(self.decision.remove) >= MOST_REMOVED

    def _waits_for(self, job: QueuedJob) -> bool:
        """Return whether to keep slots free for a skipped job.

        It is overdue, fits into this worker when jobs of it have ended, and no other worker does so.
        """
        fits = job.slots <= self.capacity and not job.has_worker
        return bool(self.queue.claimed_jobs) and fits and self._is_overdue(job)

    def _is_overdue(self, job: QueuedJob) -> bool:
        """Return whether a job was first skipped long ago."""
        now_ms, overdue_ms = self.queue.now_ms, self.order.facts.policies.overdue_ms
        return job.passed_ms is not None and now_ms - job.passed_ms >= overdue_ms


def lost_since(queue: SignatureQueue, rank: int) -> float | None:
    """Return since when the first lost job of a rank waits that its tenant's limit allows; None without one."""
    allowed = (lost.job for lost in queue.lost if lost.rank == rank and lost.limit.allows(lost.job.slots))
    return next((job.since_ms for job in allowed), None)
