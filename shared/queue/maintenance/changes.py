"""Changes of many unfinished jobs, in scripts of a bounded number: canceled, or with another priority or deadline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from shared.errors import Conflict
from shared.job import JobRecord, State, decode, encode
from shared.job_fields import Priority
from shared.queue.client import QueueComponent
from shared.queue.connections.errors import translated
from shared.queue.script_arguments import WireChange

CANCELED_AT_ONCE = 16
UPDATED_AT_ONCE = 8
"""Jobs of one script, which holds Redis for about half a millisecond."""

_ROUNDS = 4


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
        has_deadline = record.deadline_at_ms is not None
        return self.priority not in (None, record.job.priority) or bool(
            self.time_limit_ms or (self.time_limit_ms == 0 and has_deadline)
        )


@dataclass(frozen=True)
class _WireForm:
    """The wire form of a job, its state and its arrival, each empty if it is unknown."""

    job_id: str
    state: str
    wire: str
    arrived: str

    def changed(self, priority: Priority | None, deadline_ms: int | None) -> WireChange | None:
        """Return the change to a new form; None if nothing changes or this one cannot be read."""
        try:
            job = decode(self.wire)
        except ValidationError:
            return None
        changes: dict[str, object] = {} if priority is None else {"priority": priority}
        if deadline_ms is not None:
            arrived_ms = int(float(self.arrived or job.created_at_ms))
            changes["time_limit_ms"] = max(1, deadline_ms - arrived_ms) if deadline_ms else None
        wire = encode(job.model_copy(update=changes))
        return None if wire == self.wire else WireChange(self.job_id, self.wire, wire, job.computed_steps_per_image)


class JobChanges(QueueComponent):
    async def cancel(self, job_ids: Sequence[str]) -> list[bool]:
        """Cancel jobs as `Jobs.cancel` does, and return of each whether it is canceled or will be."""
        states: list[str] = []
        for piece in _pieces(job_ids, CANCELED_AT_ONCE):
            states += await self._scripts.cancel_jobs(*piece)
        return [state in (State.CANCELED, State.RUNNING) for state in states]

    async def update(self, job_ids: Sequence[str], update: JobUpdate) -> list[State | None]:
        """Change queued jobs, and return the state of each: `QUEUED` if it has the new values; None if it is unknown.

        A job keeps its arrival; where its new lane has later jobs, it goes before that lane. Raises `Conflict` for a
        job that others change all the time.
        """
        rank = None if update.priority is None else update.priority.rank
        deadline = update.time_limit_ms and await self._client.now_ms() + update.time_limit_ms
        states: dict[str, str] = {}
        pending = list(job_ids)
        for _ in range(_ROUNDS):
            for piece in _pieces(pending, UPDATED_AT_ONCE):
                forms = await self._read(piece)
                rows = [row for form in forms if (row := form.changed(update.priority, deadline)) is not None]
                states |= {form.job_id: form.state for form in forms}
                if rows:
                    replies = await self._scripts.update_jobs(rank, deadline, *rows)
                    states |= dict(zip((row.job_id for row in rows), replies, strict=True))
            pending = [job_id for job_id, state in states.items() if state == "stale"]
            if not pending:
                return [State(state) if (state := states[job_id]) else None for job_id in job_ids]
        raise Conflict(f"job {pending[0]} is being changed by others; retry", param="id")

    async def _read(self, job_ids: Sequence[str]) -> list[_WireForm]:
        with translated():
            async with self._redis.pipeline(transaction=False) as pipe:
                for job_id in job_ids:
                    pipe.hmget(self._keys.job(job_id), "state", "job", "arrived")
                found = await pipe.execute()
        return [_WireForm(job_id, *(text or "" for text in row)) for job_id, row in zip(job_ids, found, strict=True)]


def _pieces(job_ids: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    for start in range(0, len(job_ids), size):
        yield job_ids[start : start + size]
