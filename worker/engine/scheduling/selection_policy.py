"""Which parked calls run next: pure functions of who waits."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from shared.job import Priority

URGENCY = {Priority.INTERACTIVE: 0, Priority.STANDARD: 1, Priority.BULK: 2}

COMPANY_COST = 0.05
"""By what share bulk rows may lengthen the forwards of an interactive job: by one step in all where it has 20."""


class Waiting(NamedTuple):
    """One picture parked at a meeting point.

    `cohort` names those that may have company in each other; `urgency` and `age` count from 0, less going first;
    `stage` orders the kinds of work of one cohort; calls of the same `fit` may share a forward, unless they want the
    same `place` in it. A `patient` one lets all others go first, unless one of its stage is not patient.
    """

    cohort: Hashable
    urgency: int
    age: int
    stage: int
    fit: Hashable
    place: int | None = None
    patient: bool = False

    @property
    def rank(self) -> tuple[int, int]:
        return (self.urgency, self.age)


def aged(urgency: int, aside_s: float, patience_s: float) -> int:
    """Return how urgent a job is that more urgent ones have set aside for `aside_s` in all.

    Each `patience_s` lifts it by one priority, for good: it then goes before all that are younger than it, ends,
    and is not set aside step by step.
    """
    return max(0, urgency - int(aside_s / patience_s))


def next_group(waiting: Sequence[Waiting], limit: Callable[[Sequence[int], int], int]) -> list[int]:
    """Return the positions in `waiting` of the calls that run next, at least one, in order of rank.

    The cohort of the first in rank goes on, the others stay where they are until it has ended: groups that do
    not fuse run one after the other, not in turns. In it the earliest stage goes first at which not all are patient,
    and there whoever fits with the first in rank, up to `limit(positions, own)` calls: those that fit, in order of
    rank, and how many of them go first. The rest is set aside for now. Beside an interactive call, all but bulk calls
    go first; elsewhere all do. Of those who do not, the stage does not count either.
    """
    first = min(waiting, key=lambda call: call.rank)
    cohort = [at for at, call in enumerate(waiting) if call.cohort == first.cohort]
    leading = [at for at in cohort if not yields(waiting[at], first)]
    stage = min((waiting[at].patient, waiting[at].stage) for at in leading)[1]
    due = sorted((at for at in cohort if waiting[at].stage == stage), key=lambda at: waiting[at].rank)
    fitting = _one_a_place(waiting, [at for at in due if waiting[at].fit == waiting[due[0]].fit])
    own = sum(not yields(waiting[at], first) for at in fitting)
    return fitting[: max(1, limit(fitting, own))]


def yields(call: Waiting, first: Waiting) -> bool:
    """Return whether a call shares a forward with the first in rank only where that costs this one nothing."""
    return first.urgency == URGENCY[Priority.INTERACTIVE] and call.urgency >= URGENCY[Priority.BULK]


def can_wait(urgency: int, calls: int, wait_s: float, saved_s: float, in_line: float, rows: int) -> bool:
    """Return whether finished pictures wait for the next one to be finished, to be decoded together with it.

    `calls` of them wait for `wait_s` each, what they have waited included. A decoding's `saved_s` is gained by all who
    are `in_line`, and by those who come before the line has ended: 1 / (1 - load) times as many, where L batches of
    `rows` in line tell of a load of L / (1 + L) (both of M/M/1). An interactive one waits for nobody.
    """
    gaining = in_line * (1 + in_line / rows)
    return urgency != URGENCY[Priority.INTERACTIVE] and calls * wait_s < saved_s * gaining


def company(own: int, others: int, seconds: Callable[[int], float | None]) -> int:
    """Return how many of `others`, who yield, may share a forward with `own` calls.

    As many as make it no longer, within `COMPANY_COST`, than it is without them. `seconds(rows)` is what such forwards
    took, None where none was seen. That of `own` alone is seen first; then twice as many as are known to cost
    nothing, and one, are tried.
    """
    solo, free = seconds(own), 0
    while solo is not None and free < others:
        tried = min(others, 2 * free + 1)
        took = seconds(own + tried)
        if took is not None and took > (1 + COMPANY_COST) * solo:
            break
        free = tried
        if took is None:
            break
    return free


def _one_a_place(waiting: Sequence[Waiting], group: Sequence[int]) -> list[int]:
    taken: set[int] = set()
    left = []
    for at in group:
        place = waiting[at].place
        if place is None or place not in taken:
            left.append(at)
        if place is not None:
            taken.add(place)
    return left
