"""Which parked calls run next: pure functions of who waits."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from shared.job import Priority

URGENCY = {Priority.INTERACTIVE: 0, Priority.STANDARD: 1, Priority.BULK: 2}


class Waiting(NamedTuple):
    """One picture parked at a meeting point.

    `cohort` names those that may have company in each other; `urgency` and `age` count from 0, less going first;
    `stage` orders the kinds of work of one cohort; calls of the same `fit` may share a forward, unless they want the
    same `place` in it.
    """

    cohort: Hashable
    urgency: int
    age: int
    stage: int
    fit: Hashable
    place: int | None = None

    @property
    def rank(self) -> tuple[int, int]:
        return (self.urgency, self.age)


def aged(urgency: int, aside_s: float, patience_s: float) -> int:
    """Return how urgent a job is that more urgent ones have set aside for `aside_s` in all.

    Each `patience_s` lifts it by one priority, for good: it then goes before all that are younger than it, ends,
    and is not set aside step by step.
    """
    return max(0, urgency - int(aside_s / patience_s))


def next_group(waiting: Sequence[Waiting], limit: Callable[[int], int]) -> list[int]:
    """Return the positions in `waiting` of the calls that run next, at least one, in order of rank.

    The cohort of the first in rank goes on, the others stay where they are until it has ended: groups that do
    not fuse run one after the other, not in turns. In it the earliest stage goes first, and there whoever fits
    with the first in rank, up to `limit(position of the first)` calls; the rest is set aside for now.
    """
    first = min(waiting, key=lambda call: call.rank)
    cohort = [at for at, call in enumerate(waiting) if call.cohort == first.cohort]
    stage = min(waiting[at].stage for at in cohort)
    due = sorted((at for at in cohort if waiting[at].stage == stage), key=lambda at: waiting[at].rank)
    fitting = _one_a_place(waiting, [at for at in due if waiting[at].fit == waiting[due[0]].fit])
    return fitting[: max(1, limit(due[0]))]


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
