"""What the client knows of each planned job: its responses, and the jobs that they name."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from chaos.plan import PlannedJob
from chaos.sleeping_engine import final_state
from shared.job import State


@dataclass(eq=False)
class Request:
    """One planned job as the client knows it."""

    planned: PlannedJob
    parents: tuple[Request, ...] = ()
    source: Request | None = None
    """The request from one of whose artifacts it starts."""
    has_image: bool = False
    """It was sent with that artifact: its source had a job, or was a line of the same request."""
    job_ids: set[str] = field(default_factory=set)
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the client sends this request no more."""
    refused_parent: str = ""
    """The job for whose failure it was refused; its token, if that was refused itself."""
    refused: int = 0
    unanswered: int = 0
    canceled: bool = False
    """The response to a cancellation said `canceled`."""
    cancel_accepted: bool = False
    """It said `cancel_requested`, of a job that runs: the job does not succeed any more."""
    paused: list[tuple[str, float, float]] = field(default_factory=list)
    """Jobs, and from when until when they were queued and paused, as responses say (`time.time()`)."""
    seen_ends: set[str] = field(default_factory=set)
    """Terminal states that responses and streams have shown."""
    contradiction: str = ""
    forgotten: bool = False
    """Redis lost everything after this request had been sent."""
    is_deleting: bool = False
    """A deletion has been sent."""
    deleted: set[str] = field(default_factory=set)
    needed: int = 0
    """Deletions that were refused as another job started from it."""
    retries: dict[str, str] = field(default_factory=dict)
    """New jobs, by those retried."""
    retried: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the client retries it no more."""

    @property
    def after(self) -> list[str]:
        """Return the jobs that it waits for, one of each parent that has a job."""
        return [min(parent.job_ids) for parent in self.parents if parent.job_ids]

    @property
    def jobs(self) -> set[str]:
        """Return its jobs, with the retries."""
        return self.job_ids | set(self.retries.values())

    def body(self, together: tuple[Request, ...] = ()) -> dict[str, Any]:
        """Return what is sent; sources in the same bulk request are named by their keys, others by their jobs."""
        body = {**self.planned.body, "after": self.after}
        if self.source is None or self.planned.source is None or not (self.source in together or self.source.job_ids):
            return body
        job = self.source.planned.token if self.source in together else min(self.source.job_ids)
        self.has_image = True
        return body | {"image": {"job": job, "artifact": self.planned.source.artifact}}

    def state_of(self, index: int) -> int:
        """Return the state of one of its images, which shows in the color; that of its source counts."""
        planned, image = self.planned, None
        if self.has_image and self.source is not None and planned.source is not None:
            image = self.source.state_of(planned.source.artifact)
        return final_state(planned.body["seed"] + index, planned.body["steps"], image)

    def is_refused(self, problem: Mapping[str, Any]) -> bool:
        """Return whether a response refuses it because a parent has failed or is gone, and note which."""
        param = str(problem.get("param", ""))
        place = param.partition("after.")[2]
        if place.isdecimal():
            self.refused_parent = self.after[int(place)]
        elif param == "image" and self.source is not None:
            self.refused_parent = min(self.source.job_ids, default=self.source.planned.token)
        return bool(self.refused_parent)

    def note_end(self, body: Mapping[str, Any]) -> bool:
        """Note the state in a response, if it is terminal; return whether it is."""
        if not ended(body):
            return False
        self.seen_ends.add(str(body["status"]))
        return True


def ended(body: Mapping[str, Any]) -> bool:
    """Return whether a response shows a job that has ended."""
    return body.get("status") in {state.value for state in State if state.terminal}
