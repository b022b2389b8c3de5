"""How many workers a pool wants: what is in line, in seconds of one worker's time, over the wait that is aimed at."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

UNKNOWN_SEAT_S = 10.0
"""Taken for a seat of a model of which no job has ended yet."""

LATE = 2.0
"""A job that has waited for so many times the wait aimed at while no worker was starting means that the estimate is too
low: one more worker than there are."""


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
    """The workers that are alive, how many of them have jobs, and how many still load their models.

    `settled_s` is how long ago the last of the others was ready; None: not known. `start_s` is how long workers have
    taken from their start until they were ready; 0: not known.
    """

    alive: int
    busy: int
    starting: int = 0
    settled_s: float | None = None
    start_s: float = 0.0


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
    return _in_company(line)[0]


def _in_company(line: Line) -> tuple[float, float]:
    """Return what a waiting seat will cost, in seconds, and of how many rows its forwards will be."""
    if line.seat_s is None:
        return UNKNOWN_SEAT_S, 1.0
    curve = {rows: seconds for rows, seconds in (line.curve or {}).items() if rows > 0 and seconds > 0}
    if not curve:
        return line.seat_s, line.rows
    rows = min((rows for rows in curve if rows <= max(line.waiting_seats, min(curve))), key=lambda r: curve[r] / r)
    change = curve[rows] / rows / _row_s(curve, line.rows)
    return (line.seat_s * change, float(rows)) if change < 1 else (line.seat_s, line.rows)


def _row_s(curve: Mapping[int, float], rows: float) -> float:
    """Return seconds per row in forwards of `rows` rows: of the nearest count that was measured."""
    nearest = min(curve, key=lambda count: (abs(count - rows), count))
    return curve[nearest] / nearest


def wanted_workers(lines: Sequence[Line], fleet: Fleet, target_s: float) -> Scale:
    """Return how many workers let all that waits start within `target_s`, never fewer than have jobs.

    The last jobs need not end by then: a worker has the target and the length of one more batch, which is rows times
    what a seat costs. What runs counts for half of its cost: on average so much of it is left. Where workers take
    longer than the target to start, they get as long again: else they would load for longer than they work.
    """
    within_s = max(target_s, fleet.start_s)
    waiting_s, running_s, share = 0.0, 0.0, 0.0
    for line in lines:
        seat_s, rows = _in_company(line)
        waiting_s += line.waiting_seats * seat_s
        running_s += 0.5 * line.running_seats * seat_s
        share += (line.waiting_seats + 0.5 * line.running_seats) * seat_s / (within_s + rows * seat_s)
    oldest_s = max((line.oldest_wait_s for line in lines), default=0.0)
    reasons = []
    wanted = math.ceil(share - 1e-9)
    if waiting_s or running_s:
        told = f"{waiting_s:.1f} s wait and {running_s:.1f} s run"
        reasons.append(f"{told}; all start within {within_s:.3g} s with {wanted}")
        if within_s > target_s:
            reasons.append(f"{target_s:g} s are aimed at, but a worker takes {within_s:.3g} s to start")
    if unknown := [line.signature for line in lines if line.seat_s is None and line.waiting_seats]:
        reasons.append(f"taken for {UNKNOWN_SEAT_S:g} s a seat, since no job has ended yet: {', '.join(unknown[:3])}")
    if any(line.waiting_seats for line in lines) and wanted < 1:
        wanted = 1
        reasons.append("something waits: at least 1")
    if _late(oldest_s, fleet, within_s) and wanted <= fleet.alive:
        wanted = fleet.alive + 1
        reasons.append(f"the oldest has waited {oldest_s:.0f} s: one more than there are")
    if fleet.busy > wanted:
        wanted = fleet.busy
        reasons.append(f"{fleet.busy} have jobs: none of them is taken away")
    return Scale(wanted, waiting_s, running_s, oldest_s, tuple(reasons) or ("nothing waits or runs",))


def _late(oldest_s: float, fleet: Fleet, within_s: float) -> bool:
    """Tell whether a job has waited too long for the workers that there are: for their start it is no sign."""
    served_s = oldest_s if fleet.settled_s is None else min(oldest_s, fleet.settled_s)
    return bool(fleet.alive) and not fleet.starting and served_s > LATE * within_s
