"""What a run does: its jobs and its faults, both from one seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from chaos.processes import MODELS
from chaos.sleeping_engine import FAILS

SIDES = tuple(range(16, 56, 8))  # 25 sizes of two models are 50 signatures
SEEDS_PER_JOB = 16
BULK_LINES = 20
HUB_EVERY = 25
"""Of so many jobs the first is a parent of many others."""


class PlannedSource(NamedTuple):
    """The artifact of another job from which a job starts, by that job's number."""

    number: int
    artifact: int


@dataclass(frozen=True)
class PlannedJob:
    """A job that the client submits. `key`: with an Idempotency-Key; `sends` > 1: the request is repeated.

    `pauses`: seconds before each pause, and until the job is resumed. `after`: the numbers of its parents. `deleted`:
    once it has ended and no other job needs it. `retried`: once it has ended without a result.
    """

    number: int
    body: Mapping[str, Any]
    key: bool
    sends: int = 1
    cancel_after_s: float | None = None
    watch: Literal["", "poll", "sse"] = ""
    pauses: tuple[tuple[float, float], ...] = ()
    after: tuple[int, ...] = ()
    source: PlannedSource | None = None
    deleted: bool = False
    retried: bool = False

    @property
    def runs_anyway(self) -> bool:
        """Whether it runs also after a parent that has not succeeded."""
        return self.body.get("on_parent_failure") == "run"

    @property
    def fails(self) -> bool:
        return str(self.body["prompt"]).startswith(FAILS)

    @property
    def token(self) -> str:
        """The name under which the checker finds all jobs of this submit."""
        return f"r{self.number}"


@dataclass(frozen=True)
class Fault:
    """A fault that starts when the share `at` of the jobs has ended."""

    at: float
    kind: str
    seed: int


@dataclass(frozen=True)
class Mix:
    """Shares of the jobs that differ from plain ones, and how the run is loaded."""

    signatures: int = 50
    steps: tuple[int, int] = (1, 4)
    """Fewest and most steps of a job."""
    keyed: float = 0.5
    repeated: float = 0.1
    failing: float = 0.02
    canceled: float = 0.05
    expiring: float = 0.01
    children: float = 0.25
    """Share of the jobs that wait for others: in fans, chains and what these make together."""
    dependents: float = 0.2
    """Share of the jobs that start from the results of others, also of jobs of the same bulk request."""
    deleted: float = 0.05
    retried: float = 0.5
    """Share of the jobs that can end without a result, as planned, which are then retried."""
    paused: float = 0.0
    polled: float = 0.05
    streamed: float = 0.02
    bulk: float = 0.1
    """Share of the submits that are bulk requests of `BULK_LINES` jobs."""
    outstanding: int = 300


@dataclass(frozen=True)
class Plan:
    """A seed always makes the same plan. Jobs go on after `jobs` for as long as faults are left."""

    seed: int
    jobs: int
    mix: Mix = field(default_factory=Mix)
    kinds: Mapping[str, int] = field(default_factory=dict)

    def submits(self) -> Iterator[list[PlannedJob]]:
        """Yield the jobs of each request, without end."""
        rng, number = random.Random(f"jobs {self.seed}"), 0
        while True:
            count = BULK_LINES if rng.random() < self.mix.bulk else 1
            yield [_planned_job(rng, number + at, self.mix, number if count > 1 else None) for at in range(count)]
            number += count

    def faults(self) -> list[Fault]:
        """Return the faults in the order of their start: all kinds mixed, spread over the jobs."""
        rng = random.Random(f"faults {self.seed}")
        kinds = [kind for kind, count in sorted(self.kinds.items()) for _ in range(count)]
        rng.shuffle(kinds)
        return [
            Fault((place + rng.random()) / (len(kinds) + 1), kind, rng.randrange(2**32))
            for place, kind in enumerate(kinds)
        ]


def images_of(number: int) -> int:
    """Return how many images a job makes."""
    return 2 if number % 8 == 7 else 1


def _planned_job(rng: random.Random, number: int, mix: Mix, first: int | None) -> PlannedJob:
    """Return a job; `first` is that of its bulk request, of which no job waits for another but to start from it."""
    place = rng.randrange(mix.signatures)
    size = place // len(MODELS)
    body: dict[str, Any] = {
        "model": MODELS[place % len(MODELS)],
        "prompt": f"{FAILS if rng.random() < mix.failing else 'job'} {number}",
        "width": SIDES[size % len(SIDES)],
        "height": SIDES[size // len(SIDES) % len(SIDES)],
        "steps": rng.randint(*mix.steps),
        "n": images_of(number),
        "seed": number * SEEDS_PER_JOB,
        "priority": rng.choices(("interactive", "standard", "bulk"), (1, 8, 2))[0],
        "metadata": {"token": f"r{number}"},
    }
    after = _parents(rng, number if first is None else first) if rng.random() < mix.children else ()
    if after:
        body["on_parent_failure"] = rng.choice(("fail", "fail", "run"))
    if rng.random() < mix.expiring:
        body["deadline_s"] = 1
    key = rng.random() < mix.keyed or first is not None
    watch, is_deleted = rng.random(), rng.random() < mix.deleted
    source = _source(rng, number) if rng.random() < mix.dependents else None
    cancel_after_s = rng.uniform(0, 0.5) if rng.random() < mix.canceled else None
    can_fail = source or cancel_after_s is not None or "deadline_s" in body or body["prompt"].startswith(FAILS)
    return PlannedJob(
        number,
        body,
        key,
        sends=2 if key and rng.random() < mix.repeated else 1,
        cancel_after_s=cancel_after_s,
        watch="poll" if watch < mix.polled else "sse" if watch < mix.polled + mix.streamed else "",
        pauses=_pauses(rng) if mix.paused and rng.random() < mix.paused else (),
        after=after,
        source=source,
        deleted=is_deleted,
        retried=bool(can_fail) and not is_deleted and rng.random() < mix.retried,
    )


def _parents(rng: random.Random, end: int) -> tuple[int, ...]:
    """Return jobs before `end`: the last hub, the job just before, or several of the last ones."""
    if not end:
        return ()
    hub = (end - 1) // HUB_EVERY * HUB_EVERY
    some = tuple(sorted(rng.sample(range(max(0, end - HUB_EVERY), end), min(end, rng.randint(2, 4)))))
    return rng.choices(((hub,), (end - 1,), some), (5, 2, 2))[0]


def _source(rng: random.Random, end: int) -> PlannedSource | None:
    """Return an artifact of a job before `end`: of the last hub, or of one of the last jobs."""
    if not end:
        return None
    number = rng.choice(((end - 1) // HUB_EVERY * HUB_EVERY, end - 1, rng.randrange(max(0, end - HUB_EVERY), end)))
    return PlannedSource(number, rng.randrange(images_of(number)))


def _pauses(rng: random.Random) -> tuple[tuple[float, float], ...]:
    return tuple((rng.uniform(0, 1), rng.uniform(0, 2)) for _ in range(rng.randint(1, 2)))
