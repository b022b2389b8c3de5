"""Changes of many unfinished jobs, in scripts of a bounded number: canceled, paused, resumed, or with another priority
or deadline."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from pydantic import ValidationError

from shared.job import Job, State, decode, encode
from shared.job_fields import Priority
from shared.job_record import JobRecord
from shared.queue.client import QueueComponent
from shared.queue.quotas import resized
from shared.queue.transactions import Transaction
from shared.runtime.clock import now_ms

CANCELED_AT_ONCE = 16
UPDATED_AT_ONCE = 8
"""Jobs of one script, which holds Redis for about half a millisecond."""


@dataclass(frozen=True)
class JobUpdate:
    """New values of a queued job; None keeps one. `time_limit_ms` counts from the change, 0 removes the deadline."""

    priority: Priority | None = None
    time_limit_ms: int | None = None

    @property
    def text(self) -> str:
        """The new values, for the action log."""
        limit = "none" if self.time_limit_ms == 0 else self.time_limit_ms and f"{self.time_limit_ms / 1000:g} s"
        values = {"priority": self.priority, "deadline": limit}
        return ", ".join(f"{name}={value}" for name, value in values.items() if value)

    def changes(self, record: JobRecord) -> bool:
        """Return whether the job would be another one."""
        if record.state is not State.QUEUED:
            return False
        has_deadline = record.deadline_at_ms is not None or (record.waits and record.job.time_limit_ms is not None)
        return self.priority not in (None, record.job.priority) or bool(
            self.time_limit_ms or (self.time_limit_ms == 0 and has_deadline)
        )

    def ends_early(self, record: JobRecord) -> bool:
        """Return whether the new deadline of a job for later could be before it is due."""
        due_ms = math.inf if record.job.parents else record.job.not_before_ms or 0
        return record.waits and 0 < (self.time_limit_ms or 0) <= due_ms - now_ms()


_FIELDS = ("state", "job", "arrived", "tenant", "size")


def _changed(wire: str, arrived: str, priority: Priority | None, deadline_ms: int | None) -> Job | None:
    """Return a job with another priority or deadline; None if it cannot be read."""
    try:
        job = decode(wire)
    except ValidationError:
        return None
    changes: dict[str, object] = {} if priority is None else {"priority": priority}
    if deadline_ms is not None:
        arrived_ms = int(float(arrived or job.created_at_ms))
        changes["time_limit_ms"] = max(1, deadline_ms - arrived_ms) if deadline_ms else None
    return job.model_copy(update=changes)


class JobChanges(QueueComponent):
    async def cancel(self, job_ids: Sequence[str]) -> list[bool]:
        """Cancel jobs as `Jobs.cancel` does, and return of each whether it is canceled or will be."""
        states: list[str] = []
        for piece in _pieces(job_ids, CANCELED_AT_ONCE):
            states += await self._scripts.cancel_jobs(*piece)
        return [state in (State.CANCELED, State.RUNNING) for state in states]

    async def pause(self, job_ids: Sequence[str]) -> list[bool]:
        """Pause jobs as `Jobs.pause` does, and return of each whether it has not ended."""
        return await self._pause(job_ids, self._scripts.pause_jobs)

    async def resume(self, job_ids: Sequence[str]) -> list[bool]:
        """End the pauses of jobs as `Jobs.resume` does, and return of each whether it has not ended."""
        return await self._pause(job_ids, self._scripts.resume_jobs)

    async def _pause(self, job_ids: Sequence[str], script: Callable[..., Awaitable[list[str]]]) -> list[bool]:
        states: list[str] = []
        for piece in _pieces(job_ids, CANCELED_AT_ONCE):
            states += await script(*piece)
        return [state in (State.QUEUED, State.RUNNING) for state in states]

    async def update(self, job_ids: Sequence[str], update: JobUpdate) -> list[State | None]:
        """Change queued jobs, and return the state of each: `QUEUED` if it has the new values; None if it is unknown.

        A job keeps its arrival; where its new lane has later jobs, it goes before that lane.
        """
        deadline = update.time_limit_ms and await self._client.now_ms() + update.time_limit_ms
        states: list[State | None] = []
        for piece in _pieces(job_ids, UPDATED_AT_ONCE):
            states += await self._transact(partial(self._update, piece, update.priority, deadline), when_full=True)
        return states

    async def _update(
        self, job_ids: Sequence[str], priority: Priority | None, deadline_ms: int | None, transaction: Transaction
    ) -> list[State | None]:
        names = [self._keys.job(job_id) for job_id in job_ids]
        states = []
        rows = await transaction.read(*(("HMGET", name, *_FIELDS) for name in names))
        for job_id, name, (state, wire, arrived, tenant, size) in zip(job_ids, names, rows, strict=True):
            states.append(State(state) if state else None)
            job = _changed(wire, arrived or "", priority, deadline_ms) if state == State.QUEUED else None
            if job is None or (new := encode(job)) == wire:
                continue
            rank, deadline = (-1 if value is None else value for value in (priority and priority.rank, deadline_ms))
            transaction.call("change_job", job_id, rank, deadline, job.computed_steps_per_image)
            new_size = resized(size, len(new.encode()) - len(wire.encode()))
            transaction.write("HSET", name, "job", new, "size", new_size)
            transaction.call("count_footprint", tenant, size, new_size)
        return states


def _pieces(job_ids: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    for start in range(0, len(job_ids), size):
        yield job_ids[start : start + size]
