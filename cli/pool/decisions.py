"""What a pool does next: how many workers it aims at, and which it starts and drains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

State = Literal["starting", "ready", "failing", "draining"]


@dataclass(frozen=True)
class Bounds:
    """Fewest and most workers, and for how long what was wanted still counts."""

    least: int
    most: int
    cool_down_s: float


@dataclass(frozen=True)
class Want:
    """Workers that were wanted at `at_s`."""

    at_s: float
    workers: int


@dataclass(frozen=True)
class PoolWorker:
    """A worker of the pool in one of its slots, from 0. `running` are its jobs; None: it has not told yet.

    `failing` is one that has died more than once of late and is not ready again.
    """

    slot: int
    state: State
    started_s: float
    running: int | None = None


@dataclass(frozen=True)
class Moves:
    """Slots to start a worker in, and slots whose worker is to leave."""

    start: tuple[int, ...] = ()
    drain: tuple[int, ...] = ()


def remembered(wants: Sequence[Want], want: Want, cool_down_s: float) -> tuple[Want, ...]:
    """Return what still counts of `wants` once `want` is known, the largest first.

    What was followed by as much is forgotten, so there are never more of them than different numbers of workers.
    """
    kept = [old for old in wants if want.at_s - old.at_s < cool_down_s and old.workers > want.workers]
    return (*kept, want)


def aim(wants: Sequence[Want], others: int, bounds: Bounds) -> int:
    """Return how many workers to have here, where `others` of the same service are alive elsewhere."""
    wanted = max((want.workers for want in wants), default=0)
    return min(bounds.most, max(bounds.least, wanted - others))


def moves(members: Sequence[PoolWorker], wanted: int, slots: int) -> Moves:
    """Return what brings the members to `wanted`.

    A failing one does not count: another is started beside it where a slot is free, and it leaves once enough are
    ready; not sooner, or what it knows of its failures would be lost. Of too many the youngest without jobs leave;
    those that have jobs stay until they have none.
    """
    present = [member for member in members if member.state in ("starting", "ready")]
    missing = wanted - len(present)
    if missing > 0:
        taken = {member.slot for member in members}
        return Moves(start=tuple(slot for slot in range(slots) if slot not in taken)[:missing])
    idle = sorted((one for one in present if _idle(one)), key=lambda one: (one.started_s, one.slot), reverse=True)
    leaving = [one.slot for one in idle[: len(present) - wanted]]
    enough = sum(one.state == "ready" for one in present) >= wanted
    failing = [one.slot for one in members if one.state == "failing"] if enough else []
    return Moves(drain=(*leaving, *failing))


def _idle(member: PoolWorker) -> bool:
    return member.state == "starting" or member.running == 0
