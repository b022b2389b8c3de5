"""How many workers a pool wants: what is in line, in seconds of one worker's time, over the wait that is aimed at."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

UNKNOWN_SEAT_S = 10.0
"""Taken for a seat of a model of which no job has ended yet."""

LATE = 2.0
"""A job that has waited for so many targets means that the estimate is too low: one more worker than there are.

Not while one is loading its models: what it will do has to be seen first, or a slow start would bring all there are."""


@dataclass(frozen=True)
class Line:
    """One signature: what waits and runs, and what its seats were measured to cost.

    `seat_s` are GPU-seconds of one seat in forwards of `rows` rows on average, None where nothing has been measured;
    `curve` holds seconds per forward by rows, as learned on the device.
    """

    signature: str
    waiting_seats: int
    running_seats: int
    oldest_wait_s: float
    seat_s: float | None = None
    rows: float = 1.0
    curve: Mapping[int, float] | None = None


@dataclass(frozen=True)
class Fleet:
    """The workers that are alive, and how many of them have jobs, and still load their models."""

    alive: int
    busy: int
    starting: int = 0


@dataclass(frozen=True)
class Scale:
    """Workers wanted, and why."""

    wanted: int
    waiting_s: float
    running_s: float
    oldest_wait_s: float
    reasons: tuple[str, ...]


def seat_seconds(line: Line) -> float:
    """Return what a waiting seat will cost: as measured, in forwards as full as the line makes them.

    Forwards of r rows cost s(r)/r a row; the measured cost holds for the rows that were in company then.
    """
    if line.seat_s is None:
        return UNKNOWN_SEAT_S
    curve = {rows: seconds for rows, seconds in (line.curve or {}).items() if rows > 0 and seconds > 0}
    if not curve:
        return line.seat_s
    cheapest = min(curve[rows] / rows for rows in curve if rows <= max(line.waiting_seats, min(curve)))
    return line.seat_s * min(1.0, cheapest / _row_s(curve, line.rows))


def _row_s(curve: Mapping[int, float], rows: float) -> float:
    """Return seconds per row in forwards of `rows` rows: of the nearest count that was measured."""
    nearest = min(curve, key=lambda count: (abs(count - rows), count))
    return curve[nearest] / nearest


def wanted_workers(lines: Sequence[Line], fleet: Fleet, target_s: float) -> Scale:
    """Return how many workers serve what waits within `target_s`, never fewer than have jobs.

    What runs counts for half of its cost: on average so much of it is left.
    """
    waiting = {line.signature: line.waiting_seats * seat_seconds(line) for line in lines}
    running_s = sum(0.5 * line.running_seats * seat_seconds(line) for line in lines)
    waiting_s, oldest_s = sum(waiting.values()), max((line.oldest_wait_s for line in lines), default=0.0)
    reasons = []
    wanted = math.ceil((waiting_s + running_s) / target_s - 1e-9)
    if waiting_s or running_s:
        reasons.append(f"{waiting_s:.1f} s wait and {running_s:.1f} s run; {target_s:g} s are aimed at: {wanted}")
    if unknown := [line.signature for line in lines if line.seat_s is None and line.waiting_seats]:
        reasons.append(f"taken for {UNKNOWN_SEAT_S:g} s a seat, since no job has ended yet: {', '.join(unknown[:3])}")
    if any(line.waiting_seats for line in lines) and wanted < 1:
        wanted = 1
        reasons.append("something waits: at least 1")
    if oldest_s > LATE * target_s and fleet.alive and not fleet.starting and wanted <= fleet.alive:
        wanted = fleet.alive + 1
        reasons.append(f"the oldest has waited {oldest_s:.0f} s: one more than there are")
    if fleet.busy > wanted:
        wanted = fleet.busy
        reasons.append(f"{fleet.busy} have jobs: none of them is taken away")
    return Scale(wanted, waiting_s, running_s, oldest_s, tuple(reasons) or ("nothing waits or runs",))
