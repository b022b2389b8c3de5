"""The queue as a plain model in memory: what each operation must return and change, without an order of claims."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from shared.job import Job, State
from shared.job_fields import OnDeadline, OnParentFailure
from shared.queue import Claim, Submission
from shared.queue.checkpoints import JobCheckpoint
from shared.queue.records import RANKS

MAX_ATTEMPTS = 1
CHECKPOINT_LOSSES = 2
MAX_QUEUED_JOBS = 24
MAX_QUEUED_JOBS_PER_TENANT = 12

Key = tuple[str, str | None]
"""A tenant and an Idempotency-Key."""


@dataclass
class ModelJob:
    """A job's record. `history` holds all its states, also those before a redrive or of an earlier record.

    `waiting`: for later, until it is `due` and queued in its lane; not before its `parents` have ended, from when its
    time limit counts (`counts_later`). `moved`: it may be in its lane by its return and not
    by its deadline, which counts as long as it can be met.
    """

    submission: Submission
    history: list[State] = field(default_factory=list)
    epoch: int = 0
    worker: str | None = None
    cancel: bool = False
    paused: bool = False
    waiting: bool = False
    due: bool = False
    parents: set[str] = field(default_factory=set)
    counts_later: bool = False
    solo: bool = False
    losses: int = 0
    has_deadline: bool = False
    late: bool = False
    moved: bool = False
    lease_expired: bool = False
    dead_letter: bool = False
    token: str | None = None
    checkpoint: JobCheckpoint | None = None
    checkpoint_losses: int = 0
    step: int = 0
    lost_at: int | None = None
    artifacts: int = 0
    forgotten: bool = False

    @property
    def state(self) -> State:
        return self.history[-1]

    @property
    def in_lane(self) -> bool:
        """Whether it is in its lane, if it is queued."""
        return not (self.paused or self.waiting)

    @property
    def is_listed(self) -> bool:
        """Whether it is listed by its deadline, if it is queued."""
        return self.has_deadline and (not self.waiting or (self.paused and not self.counts_later))

    @property
    def tenant(self) -> str:
        return self.submission.job.tenant

    @property
    def slots(self) -> int:
        return self.submission.job.slots

    @property
    def runs_late(self) -> bool:
        return self.submission.job.on_deadline is OnDeadline.RUN

    @property
    def lane(self) -> tuple[str, str, int]:
        return (self.submission.signature, self.tenant, self.rank)

    @property
    def rank(self) -> int:
        return RANKS.index(self.submission.job.priority)

    @property
    def objects(self) -> int:
        """Objects in storage: artifacts, and the files of the checkpoint."""
        return self.artifacts + (0 if self.checkpoint is None else len(self.checkpoint.stored))

    def holds(self, worker: str, epoch: int) -> bool:
        """Return whether this claim of the job is current."""
        return (self.state, self.worker, self.epoch) == (State.RUNNING, worker, epoch) and not self.forgotten


class QueueModel:
    def __init__(self) -> None:
        self.jobs: dict[str, ModelJob] = {}
        self.keys: dict[Key, tuple[str, str | None]] = {}
        self.queued_limits: dict[str, int] = {}
        self.running_limits: dict[str, int] = {}
        self.untold: list[tuple[str, State, list[str]]] = []
        """Jobs that have ended, and those that wait for them and are yet to be told."""
        self.events: list[tuple[str, State]] = []
        """Every state change of every job, in the order in which it must be published."""

    def with_state(self, *states: State) -> dict[str, ModelJob]:
        return {job_id: job for job_id, job in self.jobs.items() if job.state in states and not job.forgotten}

    def queued(self) -> dict[str, ModelJob]:
        return self.with_state(State.QUEUED)

    def running(self) -> dict[str, ModelJob]:
        return self.with_state(State.RUNNING)

    def ended(self) -> dict[str, ModelJob]:
        return {job_id: job for job_id, job in self.jobs.items() if job.state.terminal and not job.forgotten}

    def count(self, jobs: Iterable[ModelJob], by: Callable[[ModelJob], str | None], *, slots: bool) -> dict[str, int]:
        """Return the jobs or their slots by an attribute."""
        counted: Counter[str] = Counter()
        for job in jobs:
            counted[by(job) or ""] += job.slots if slots else 1
        return dict(counted)

    def set_state(self, job_id: str, state: State) -> None:
        job = self.jobs[job_id]
        job.history.append(state)
        self.events.append((job_id, state))
        job.lease_expired = False
        if state is State.QUEUED:
            job.worker, job.step = None, 0

    def submit(self, submission: Submission) -> tuple[str, str]:
        """Queue a job; return the result's kind and the job's id, as `Jobs.submit` must."""
        job_id, tenant = submission.job.id, submission.job.tenant
        known = self.jobs.get(job_id)
        if known is not None and not known.forgotten:
            return "queued", job_id
        key = (tenant, submission.idempotency_key)
        earlier, fingerprint = self.keys.get(key, (None, None))
        if earlier is not None:  # also of a deleted job
            return ("replayed" if fingerprint == submission.fingerprint else "mismatch"), earlier
        waiting = self.queued().values()
        limit = self.queued_limits.get(tenant, MAX_QUEUED_JOBS_PER_TENANT)
        mine, room = sum(job.tenant == tenant for job in waiting), MAX_QUEUED_JOBS - len(waiting)
        share = room * max(1, limit / (MAX_QUEUED_JOBS - limit)) if limit < MAX_QUEUED_JOBS else math.inf
        if mine >= min(limit, share) or not room:
            return "full", ""
        parents = [self.jobs.get(parent) for parent in submission.job.parents]
        if not all(one is not None and not one.forgotten and one.tenant == tenant for one in parents):
            return "invalid", ""
        failed = [one for one in parents if one is not None and one.state.terminal and one.state is not State.SUCCEEDED]
        if any(not _runs_after(submission.job, one.submission.job.id) for one in failed):
            return "invalid", ""
        history = [] if known is None else known.history
        self.jobs[job_id] = ModelJob(submission, history)
        self.jobs[job_id].has_deadline = submission.job.time_limit_ms is not None
        left = {one for one in submission.job.parents if not self.jobs[one].state.terminal}
        self.jobs[job_id].parents, self.jobs[job_id].counts_later = left, bool(left)
        self.jobs[job_id].waiting = submission.job.not_before_ms is not None or bool(left)
        self.jobs[job_id].due = submission.job.not_before_ms is None
        self.set_state(job_id, State.QUEUED)
        if submission.idempotency_key is not None:
            self.keys[key] = (job_id, submission.fingerprint)
        return "queued", job_id

    def claim(self, claims: list[Claim], worker: str) -> None:
        for one in claims:
            job = self.jobs[one.job.id]
            assert job.state is State.QUEUED, f"{one.job.id} was {job.state} and is claimed"
            assert job.in_lane, f"{one.job.id} is claimed while it is paused or for later"
            assert not job.late or job.runs_late, f"{one.job.id} is claimed after its deadline"
            job.has_deadline = job.has_deadline and not job.late
            assert one.epoch == job.epoch + 1
            assert one.must_run_solo == job.solo
            assert one.job == job.submission.job
            assert one.checkpoint == job.checkpoint
            job.epoch, job.worker = one.epoch, worker
            self.set_state(one.job.id, State.RUNNING)

    def check_quota(self, tenant: str, before: int, claimed: list[int]) -> None:
        """Fail if a tenant with `before` running slots has claimed jobs beyond its quota."""
        limit = self.running_limits.get(tenant)
        if limit is not None and claimed:
            single = before == 0 and len(claimed) == 1  # a job above the limit runs as the only one
            assert single or before + sum(claimed) <= limit, f"{tenant}: {before} + {claimed} of {limit} slots"

    def end(self, job_id: str, state: State) -> None:
        self.set_state(job_id, state)
        self.jobs[job_id].has_deadline = self.jobs[job_id].late = self.jobs[job_id].paused = False
        self.jobs[job_id].checkpoint, self.jobs[job_id].waiting = None, False
        self.jobs[job_id].parents = set()
        children = [one for one, job in self.jobs.items() if job_id in job.parents and not self.is_untold(one, job_id)]
        if children:
            self.untold.append((job_id, state, children))

    def keep_checkpoint(self, job_id: str, worker: str, epoch: int, checkpoint: JobCheckpoint) -> str:
        job = self.jobs[job_id]
        if not job.holds(worker, epoch):
            return "stale"
        job.checkpoint, job.checkpoint_losses = checkpoint, 0
        if job.solo and job.lost_at is not None and checkpoint.step > job.lost_at:
            job.solo, job.lost_at = False, checkpoint.step
        return "kept"

    def settle(self, job_id: str, worker: str, epoch: int, state: State, token: str) -> bool:
        job = self.jobs[job_id]
        if not job.forgotten and job.token == token:
            return True
        if not job.holds(worker, epoch):
            return False
        job.token, job.artifacts = token, int(state is State.SUCCEEDED)
        self.end(job_id, State.CANCELED if job.cancel and state is State.SUCCEEDED else state)
        return True

    def cancel(self, job_id: str) -> None:
        job = self.jobs[job_id]
        if job.forgotten or job.state.terminal:
            return
        job.cancel = True
        if job.state is State.QUEUED:
            self.end(job_id, State.CANCELED)

    def pause(self, job_id: str, paused: bool) -> None:
        """Pause a job, or resume it; one that is canceled or has ended stays as it is."""
        job = self.jobs[job_id]
        if job.forgotten or job.state.terminal or job.cancel or job.paused == paused:
            return
        job.paused = paused
        if job.state is State.QUEUED:
            job.moved = True
            job.waiting = job.waiting and (paused or not job.due or bool(job.parents))
            self.set_state(job_id, State.QUEUED)

    def is_untold(self, child: str, parent: str) -> bool:
        """Return whether an earlier end of the parent is yet to be told to the child."""
        return any(one == parent and child in children for one, _, children in self.untold)

    def _tell(self, child: str, parent: str, state: State) -> None:
        job = self.jobs[child]
        if parent in job.parents:
            if state is not State.SUCCEEDED and not _runs_after(job.submission.job, parent):
                return self.end(child, State.FAILED)
            job.parents.discard(parent)

    def queue_due(self) -> int:
        """Tell jobs of parents that have ended, and queue those for later that are due; return how many."""
        told = 0
        while self.untold:
            parent, state, children = self.untold.pop(0)
            told += len(children)
            for child in children:
                self._tell(child, parent, state)
        due = [job_id for job_id, job in self.queued().items() if job.waiting and job.due and not job.parents]
        return told + self._arrive([job_id for job_id in due if not self.jobs[job_id].paused])

    def _arrive(self, due: list[str]) -> int:
        for job_id in due:
            self.jobs[job_id].waiting = False
            self.set_state(job_id, State.QUEUED)
        return len(due)

    def update(self, job_id: str, updated: Job, time_limit_ms: int | None) -> None:
        """Replace a queued job; `time_limit_ms`: None if its deadline is kept, 0 if it has none any more."""
        job = self.jobs[job_id]
        job.submission = replace(job.submission, job=updated)
        if time_limit_ms is not None:
            job.moved = job.moved or not job.has_deadline
            job.has_deadline, job.late, job.counts_later = bool(time_limit_ms), False, False

    def give_back(self, job_id: str, *, lost: bool) -> None:
        """Queue a running job again, released or lost, or end it."""
        job = self.jobs[job_id]
        if job.cancel:
            return self.end(job_id, State.CANCELED)
        job.checkpoint_losses += lost
        if job.checkpoint_losses >= CHECKPOINT_LOSSES:
            job.checkpoint, job.checkpoint_losses = None, 0
        job.losses += lost and job.solo
        if lost and job.solo and job.losses >= MAX_ATTEMPTS:
            job.dead_letter = True
            return self.end(job_id, State.FAILED)
        if lost:
            job.lost_at = max(job.lost_at or 0, job.step)
        job.solo, job.moved = job.solo or lost, True
        return self.set_state(job_id, State.QUEUED)

    def redrive(self, job_id: str) -> bool:
        job = self.jobs[job_id]
        if not job.dead_letter:
            return False
        job.dead_letter, job.cancel, job.losses, job.solo, job.token = False, False, 0, True, None
        job.moved = True
        self.set_state(job_id, State.QUEUED)
        return True

    def dependents(self, job_id: str) -> set[str]:
        """Return the jobs that have not ended and start from an artifact of a job."""
        unfinished = self.with_state(State.QUEUED, State.RUNNING).items()
        return {child for child, job in unfinished if job_id in job.submission.job.sources}

    def forget(self, job_id: str) -> bool:
        job = self.jobs[job_id]
        if job.forgotten or not job.state.terminal:
            return False
        job.forgotten, job.dead_letter = True, False
        return True


def _runs_after(job: Job, parent: str) -> bool:
    """Return whether a job is to run after a parent that has not succeeded."""
    return job.on_parent_failure is OnParentFailure.RUN and parent not in job.sources
