"""Who goes on next: what is known of the jobs here, asked of the rules (`policy.py`)."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

from worker.engine.fixed import place_of
from worker.engine.hub import Picture
from worker.engine.meeting import Call, Stage
from worker.engine.memory import Kind, Memory
from worker.engine.pace import Pace
from worker.engine.policy import Waiting, aged, can_wait, company, next_group, yields
from worker.engine.seated import SeatedJob


class Member(NamedTuple):
    """One picture of a job, and the call at which it is parked."""

    job: SeatedJob
    picture: Picture
    call: Call

    @property
    def kind(self) -> Kind:
        """What its forward's time and memory depend on, but for the number of calls."""
        point = f"{self.call.point.component}.{self.call.point.method}"
        return (self.job.seat.spec.id, self.job.shape, f"{point} of previews" if self.call.preview else point)

    @property
    def fixed(self) -> int | None:
        """The number of calls that its forward is filled up to, None for as many as there are."""
        most = self.job.fixed_rows
        return None if most is None else min(most, self._at_once or most)

    @property
    def place(self) -> int:
        """Where it has to be in a forward of a fixed number of calls."""
        return place_of(self.job.seat.job, self.job.pictures.index(self.picture), self.fixed or 1)

    @property
    def steps_left(self) -> int:
        """After how many steps its picture comes to its end."""
        return self.job.steps_left(self.picture)

    def most(self, memory: Memory) -> int:
        """Return how many of its kind may go on together."""
        most = memory.allowed(self.kind, self.job.seat.spec.max_batch)
        return min(most, self._at_once or most)

    @property
    def _at_once(self) -> int | None:
        return self.job.decoded_at_once if self.call.point.component == "vae" else None


class Chooser:
    """Chooses whose forward is run next, and notes at the jobs what that means for them."""

    def __init__(self, pace: Pace, memory: Memory, patience_s: float) -> None:
        self._pace = pace
        self._memory = memory
        self._patience_s = patience_s

    def choose(self, jobs: Collection[SeatedJob]) -> list[Member]:
        """Return those of all parked pictures that go on in one forward; none if there is none."""
        parked = [
            Member(job, picture, picture.call) for job in jobs for picture in job.pictures if picture.call is not None
        ]
        if not parked:
            return []
        now = time.monotonic()
        waiting = [self._waiting(member, parked, now) for member in parked]
        group = next_group(waiting, lambda fitting, own: self._limit([parked[at] for at in fitting], own))
        members = [parked[at] for at in group]
        _note_set_aside(jobs, members, now)
        _note_misfits(parked, waiting, members, waiting[group[0]])
        return members

    def _waiting(self, member: Member, parked: Sequence[Member], now: float) -> Waiting:
        job, call = member.job, member.call
        urgency = aged(job.urgency, job.aside_s(now), self._patience_s)
        fit, place = (call.fit, None) if job.fixed_rows is None else (call.exact_fit, member.place)
        patient = call.point.method == "decode" and self._expects_company(member, parked, now)
        return Waiting(job.cohort, urgency, job.age, call.point.stage, fit, place, patient)

    def _expects_company(self, member: Member, parked: Sequence[Member], now: float) -> bool:
        """Return whether a finished picture waits for the next one, to be decoded together with it."""
        job, _, call = member
        alike = [other for other in parked if (other.job.cohort, other.job.shape) == (job.cohort, job.shape)]
        coming = [other.steps_left for other in alike if other.call.point.stage is Stage.DENOISE]
        calls = sum(other.kind == member.kind for other in alike)
        alone_s, pair_s = (self._pace.learned((*member.kind, calls)) for calls in (1, 2))
        if call.preview or not coming or calls >= member.most(self._memory) or alone_s is None or pair_s is None:
            return False
        # What it has waited counts too: the one to come may be set aside, again and again.
        wait_s = now - call.since_s + min(coming) * job.forward_s
        return can_wait(job.urgency, calls, wait_s, 2 * alone_s - pair_s, job.in_line(now))

    def _limit(self, members: Sequence[Member], own: int) -> int:
        """Return how many calls may run together; the last ones but `own` yield to the others."""
        first = members[0]
        if first.job.fixed_rows is not None:
            return first.fixed or 1
        most = min(first.most(self._memory), len(members))
        if own >= most:
            return most
        return own + company(own, most - own, lambda calls: self._pace.learned((*first.kind, calls)))


def _note_set_aside(jobs: Collection[SeatedJob], members: Sequence[Member], now: float) -> None:
    going = {job.key for job, _, _ in members}
    urgency = min(job.urgency for job, _, _ in members)
    for job in jobs:
        if job.started and job.key not in going and job.urgency > urgency:
            job.set_aside(now)
        else:
            job.take_up(now)


def _note_misfits(
    parked: Sequence[Member], waiting: Sequence[Waiting], members: Sequence[Member], lead: Waiting
) -> None:
    if lead.stage != Stage.DENOISE or len(members) == len(parked):
        return
    chosen = {job.key for job, _, _ in members}
    for (apart, _, _), call in zip(parked, waiting, strict=True):
        if call.cohort != lead.cohort or call.stage != lead.stage or apart.key in chosen:
            continue
        kept_away = yields(call, lead)
        apart.met_misfit |= not kept_away
        for job, _, _ in members:
            job.went_first |= kept_away
            job.met_misfit |= not kept_away
