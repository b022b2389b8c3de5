"""Who goes on next: what is known of the jobs here, asked of the rules (`policy.py`)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from typing import NamedTuple

from worker.engine.fusion.fused_call import fixed_position
from worker.engine.fusion.image_task import ImageTask
from worker.engine.fusion.module_proxy import ParkedCall, Stage
from worker.engine.scheduling.engine_job import EngineJob
from worker.engine.scheduling.memory_limits import Kind, MemoryLimits
from worker.engine.scheduling.selection_policy import Waiting, aged, can_wait, company, next_group, yields
from worker.engine.scheduling.timing import ForwardTimer


class Candidate(NamedTuple):
    """One picture of a job, and the call at which it is parked."""

    job: EngineJob
    picture: ImageTask
    call: ParkedCall

    @property
    def kind(self) -> Kind:
        """What its forward's time and memory depend on, but for the number of calls."""
        point = self.call.shared_method.name
        return (self.job.seat.spec.id, self.job.shape, f"{point} of previews" if self.call.preview else point)

    @property
    def fixed(self) -> int | None:
        """The number of calls that its forward is filled up to, None for as many as there are."""
        most = self.job.fixed_rows
        return None if most is None else min(most, self._at_once or most)

    @property
    def place(self) -> int:
        """Where it has to be in a forward of a fixed number of calls."""
        return fixed_position(self.job.seat.job, self.job.pictures.index(self.picture), self.fixed or 1)

    @property
    def finished(self) -> bool:
        """Whether its picture has come to its end, and waits to be decoded."""
        return self.call.shared_method.method == "decode" and not self.call.preview

    def most(self, memory: MemoryLimits) -> int:
        """Return how many of its kind may go on together."""
        most = memory.allowed(self.kind, self.job.seat.spec.max_batch)
        return min(most, self._at_once or most)

    @property
    def _at_once(self) -> int | None:
        return self.job.decoded_at_once if self.call.shared_method.component == "vae" else None


class Chooser:
    """Chooses whose forward is run next, and notes at the jobs what that means for them."""

    def __init__(self, pace: ForwardTimer, memory: MemoryLimits, patience_s: float) -> None:
        self._pace = pace
        self._memory = memory
        self._patience_s = patience_s

    def choose(self, jobs: Collection[EngineJob]) -> list[Candidate]:
        """Return those of all parked pictures that go on in one forward; none if there is none."""
        parked = [
            Candidate(job, picture, picture.call)
            for job in jobs
            for picture in job.pictures
            if picture.call is not None
        ]
        if not parked:
            return []
        now = time.monotonic()
        patient = self._patient(parked, now)
        waiting = [self._waiting(member, at in patient, now) for at, member in enumerate(parked)]
        group = next_group(waiting, lambda fitting, own: self._limit([parked[at] for at in fitting], own))
        members = [parked[at] for at in group]
        _note_set_aside(jobs, members, now)
        _note_misfits(parked, waiting, members, waiting[group[0]])
        return members

    def _waiting(self, member: Candidate, patient: bool, now: float) -> Waiting:
        job, call = member.job, member.call
        urgency = aged(job.urgency, job.aside_s(now), self._patience_s)
        fit, place = (call.batch_key, None) if job.fixed_rows is None else (call.exact_batch_key, member.place)
        return Waiting(job.cohort, urgency, job.age, call.shared_method.stage, fit, place, patient)

    def _patient(self, parked: Sequence[Candidate], now: float) -> set[int]:
        """Return the positions of finished pictures that wait for the next one, to be decoded together with it."""
        finished = Counter((member.job.cohort, member.kind) for member in parked if member.finished)
        if not finished:
            return set()
        soonest: dict[tuple[Hashable, str], int] = {}  # to come to its end, in steps
        for job, picture, call in parked:
            if call.shared_method.stage is Stage.DENOISE:
                alike, left = (job.cohort, job.shape), job.steps_left(picture)
                if left > 0:  # else nobody knows: its pipeline has no progress bar, or is between two of them
                    soonest[alike] = min(left, soonest.get(alike, left))
        patient = set()
        for at, member in enumerate(parked):
            if member.finished:
                calls = finished[member.job.cohort, member.kind]
                steps = soonest.get((member.job.cohort, member.job.shape))
                if steps is not None and self._can_wait(member, calls, steps, now):
                    patient.add(at)
        return patient

    def _can_wait(self, member: Candidate, calls: int, steps: int, now: float) -> bool:
        """Return whether one of `calls` finished pictures waits for the next one, which has `steps` to go."""
        alone_s, pair_s = (self._pace.learned((*member.kind, together)) for together in (1, 2))
        if alone_s is None or pair_s is None or calls >= member.most(self._memory):
            return False
        job = member.job
        # What it has waited counts too: the one to come may be set aside, again and again.
        wait_s = now - member.call.since_s + steps * job.forward_s
        return can_wait(job.urgency, calls, wait_s, 2 * alone_s - pair_s, job.in_line(now), job.seat.spec.max_batch)

    def _limit(self, members: Sequence[Candidate], own: int) -> int:
        """Return how many calls may run together; the last ones but `own` yield to the others."""
        first = members[0]
        if first.job.fixed_rows is not None:
            return first.fixed or 1
        most = min(first.most(self._memory), len(members))
        if own >= most:
            return most
        return own + company(own, most - own, lambda calls: self._pace.learned((*first.kind, calls)))


def _note_set_aside(jobs: Collection[EngineJob], members: Sequence[Candidate], now: float) -> None:
    going = {job.key for job, _, _ in members}
    urgency = min(job.urgency for job, _, _ in members)
    for job in jobs:
        if job.started and job.key not in going and job.urgency > urgency:
            job.set_aside(now)
        else:
            job.take_up(now)


def _note_misfits(
    parked: Sequence[Candidate], waiting: Sequence[Waiting], members: Sequence[Candidate], lead: Waiting
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
