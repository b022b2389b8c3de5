"""Number of workers a pool needs: GPU-seconds of queued and running jobs over the target wait."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

UNKNOWN_SLOT_S = 10.0
"""Assumed cost of a slot of a model until its first job has ended."""

LATE_FACTOR = 2.0
"""A job queued for this many target waits while no worker starts shows that the estimate is too low."""


@dataclass(frozen=True)
class SignatureLoad:
    """Queued and running slots of one signature, and their measured cost.

    `slot_s` are GPU-seconds of one slot in forwards of `rows` rows on average, None if not measured yet.
    `cost_curve` holds seconds per forward by rows.
    """

    signature: str
    queued_slots: int
    running_slots: int
    oldest_wait_s: float
    slot_s: float | None = None
    rows: float = 1.0
    cost_curve: Mapping[int, float] | None = None


@dataclass(frozen=True)
class Fleet:
    """Live workers, those with jobs (`busy`), and those that still load their models (`starting`).

    `settled_s` is the time since the last worker became ready, None if unknown; `start_s` the usual time until a new
    worker is ready, 0 if unknown.
    """

    alive: int
    busy: int
    starting: int = 0
    settled_s: float | None = None
    start_s: float = 0.0


@dataclass(frozen=True)
class Scale:
    """Wanted workers, the GPU-seconds of queued and running jobs, and the reasons."""

    wanted: int
    queued_s: float
    running_s: float
    oldest_wait_s: float
    reasons: tuple[str, ...]


def slot_seconds(load: SignatureLoad) -> float:
    """Return the expected GPU-seconds of a queued slot, in forwards as full as the queue allows."""
    return _expected(load)[0]


def _expected(load: SignatureLoad) -> tuple[float, float]:
    """Return the expected GPU-seconds of a queued slot and the rows of its forwards.

    A row of an r-row forward costs curve(r) / r. The measured `slot_s` is scaled from its own mean rows to the best
    r that the queue can fill.
    """
    if load.slot_s is None:
        return UNKNOWN_SLOT_S, 1.0
    curve = {rows: seconds for rows, seconds in (load.cost_curve or {}).items() if rows > 0 and seconds > 0}
    if not curve:
        return load.slot_s, load.rows
    rows = min((rows for rows in curve if rows <= max(load.queued_slots, min(curve))), key=lambda r: curve[r] / r)
    nearest = min(curve, key=lambda count: (abs(count - load.rows), count))  # to the measured mean rows
    change = curve[rows] / rows / (curve[nearest] / nearest)
    return (load.slot_s * change, float(rows)) if change < 1 else (load.slot_s, load.rows)


def wanted_workers(loads: Sequence[SignatureLoad], fleet: Fleet, target_s: float) -> Scale:
    """Return the workers needed to start all queued jobs within `target_s`, at least those that are busy.

    Jobs must start, not end, in time, so a worker's capacity is the target plus one more batch (rows x slot cost).
    Running slots count half: on average half of their work is left. If workers take longer than the target to start,
    their start time replaces it: otherwise they would spend more time loading than working.
    """
    within_s = max(target_s, fleet.start_s)
    queued_s, running_s, share = 0.0, 0.0, 0.0
    for load in loads:
        slot_s, rows = _expected(load)
        queued_s += load.queued_slots * slot_s
        running_s += 0.5 * load.running_slots * slot_s
        share += (load.queued_slots + 0.5 * load.running_slots) * slot_s / (within_s + rows * slot_s)
    oldest_s = max((load.oldest_wait_s for load in loads), default=0.0)
    reasons = []
    wanted = math.ceil(share - 1e-9)
    if queued_s or running_s:
        reasons.append(
            f"{queued_s:.1f} s queued and {running_s:.1f} s running; all start within {within_s:.3g} s with {wanted}"
        )
        if within_s > target_s:
            reasons.append(f"the target is {target_s:g} s, but a worker takes {within_s:.3g} s to start")
    if unknown := [load.signature for load in loads if load.slot_s is None and load.queued_slots]:
        reasons.append(f"assumed {UNKNOWN_SLOT_S:g} s a slot, as no job has ended yet: {', '.join(unknown[:3])}")
    if any(load.queued_slots for load in loads) and wanted < 1:
        wanted = 1
        reasons.append("jobs are queued: at least 1")
    if _late(oldest_s, fleet, within_s) and wanted <= fleet.alive:
        wanted = fleet.alive + 1
        reasons.append(f"the oldest job has waited {oldest_s:.0f} s: one more worker")
    if fleet.busy > wanted:
        wanted = fleet.busy
        reasons.append(f"{fleet.busy} workers have jobs and are kept")
    return Scale(wanted, queued_s, running_s, oldest_s, tuple(reasons) or ("no jobs are queued or running",))


def _late(oldest_s: float, fleet: Fleet, within_s: float) -> bool:
    """Return whether a job has waited too long, not counting the time before the workers were ready."""
    served_s = oldest_s if fleet.settled_s is None else min(oldest_s, fleet.settled_s)
    return bool(fleet.alive) and not fleet.starting and served_s > LATE_FACTOR * within_s
