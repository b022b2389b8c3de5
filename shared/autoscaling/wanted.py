"""Number of workers wanted: GPU-seconds of queued and running jobs over the target wait."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shared.autoscaling.backlog import Backlog, SignatureLoad, slot_cost, startable_parts, unpaused_slots
from shared.autoscaling.bulk_windows import bulk_share

UNKNOWN_WORKERS = 2
"""Most workers for models of unknown cost, one each: the end of a model's first job replaces them by an estimate."""

BULK_SLACK = 1.25
"""A worker more than bulk jobs need is kept until they need so much less: it ends their work sooner, at the same cost,
and the number does not alternate."""

LATE_FACTOR = 2.0
"""A job queued for this many target waits while no worker starts shows that the estimate is too low."""


@dataclass(frozen=True)
class ReadyTimes:
    """Seconds since the first and the last worker that serves a model became ready; 0 while all of them start."""

    first_s: float = 0.0
    last_s: float = 0.0


@dataclass(frozen=True)
class Fleet:
    """Live workers, those with jobs (`busy`), those with other than bulk jobs (`urgent`), and those that still start.

    `serving` has the models that live workers serve. `unavailable` workers serve none now, as they cannot load any.
    `bulk_part` is the part of the running jobs that are bulk; `start_s` the usual time until a new worker is ready, 0
    if unknown.
    """

    alive: int = 0
    busy: int = 0
    urgent: int = 0
    starting: int = 0
    unavailable: int = 0
    serving: Mapping[str, ReadyTimes] | None = None
    bulk_part: float = 0.0
    start_s: float = 0.0

    def serves(self, model: str) -> bool:
        """Return whether more workers would help a model: those present serve it, or there are none."""
        return self.serving is None or model in self.serving or not (self.alive or self.unavailable)


@dataclass(frozen=True)
class Targets:
    """Seconds within which jobs are to start, and bulk jobs without a deadline are to end."""

    wait_s: float
    bulk_window_s: float


@dataclass(frozen=True)
class Scale:
    """Wanted workers, the GPU-seconds of queued and running jobs of known cost, and the reasons."""

    wanted: int
    queued_s: float
    running_s: float
    oldest_wait_s: float
    reasons: tuple[str, ...]


def wanted_workers(backlog: Backlog, fleet: Fleet, targets: Targets) -> Scale:
    """Return the workers needed to start all queued jobs within the target and to end bulk jobs within their windows.

    Jobs count as far as their tenant's quota lets them start, and only for models that a live worker serves. If workers
    take longer than the target to start, their start time replaces it: otherwise they would spend more time loading
    than working.
    """
    within_s = max(targets.wait_s, fleet.start_s)
    served = replace(backlog, loads=[load for load in backlog.loads if fleet.serves(load.model)])
    urgent = _urgent_share(served, fleet, within_s)
    bulk = bulk_share(served, targets.bulk_window_s, within_s)
    unknown = _unknown_models(served)
    wanted = math.ceil(urgent + bulk - 1e-9)
    wanted = max(wanted, min(wanted + 1, math.ceil(urgent + BULK_SLACK * bulk), fleet.alive))
    wanted += min(UNKNOWN_WORKERS, len(unknown))
    queued_s, running_s = _seconds(backlog.loads)
    reasons = []
    if queued_s or running_s:
        reasons.append(f"{queued_s:.1f} s queued and {running_s:.1f} s running")
    if urgent:
        reasons.append(f"jobs start within {within_s:.3g} s with {urgent:.2f} workers")
    if bulk:
        reasons.append(f"bulk jobs end within their windows with {bulk:.2f} workers")
    if within_s > targets.wait_s:
        reasons.append(f"the target is {targets.wait_s:g} s, but a worker takes {within_s:.3g} s to start")
    if unknown:
        reasons.append(f"one worker each, at most {UNKNOWN_WORKERS}, as no job has ended yet: {_names(unknown)}")
    if unserved := sorted({load.model for load in backlog.loads if not fleet.serves(load.model)}):
        reasons.append(f"no live worker serves these models, which do not count: {_names(unserved)}")
    wanted, reasons = _bounded(wanted, reasons, backlog, fleet, within_s)
    oldest_s = max((load.oldest_wait_s for load in backlog.loads), default=0.0)
    return Scale(wanted, queued_s, running_s, oldest_s, tuple(reasons) or ("no jobs are queued or running",))


def _urgent_share(served: Backlog, fleet: Fleet, within_s: float) -> float:
    """Return the workers that start all interactive and standard jobs of known cost in time.

    They must start, not end, in time, so a worker's capacity is the target plus one more batch (rows x slot cost).
    Running slots count half: on average half of their work is left.
    """
    parts, share = startable_parts(served), 0.0
    for load in served.loads:
        if (cost := slot_cost(load, parts[load.model])) is not None:
            slots = load.work_slots * parts[load.model] + 0.5 * load.running_slots * (1 - fleet.bulk_part)
            share += slots * cost.seconds / (within_s + cost.rows * cost.seconds)
    return share


def _unknown_models(served: Backlog) -> list[str]:
    """Return the models of unknown cost with running slots, or queued ones that no pause holds back."""
    unpaused = unpaused_slots(served)
    unknown = [load for load in served.loads if load.slot_s is None]
    return sorted({load.model for load in unknown if load.running_slots or unpaused[load.model]})


def _bounded(wanted: int, reasons: list[str], backlog: Backlog, fleet: Fleet, within_s: float) -> tuple[int, list[str]]:
    """Return at least one worker for queued jobs, those that are kept, and one more for a late job."""
    if wanted < 1 and any(_slots(load) for load in backlog.loads):
        wanted = 1
        reasons.append("jobs are queued or running: at least 1")
    kept = fleet.urgent if any(load.bulk_slots for load in backlog.loads) else fleet.busy
    if kept > wanted:
        wanted = kept
        reasons.append(f"{kept} workers have jobs and are kept")
    late = [load.waiting_s for load in backlog.loads if _late(load, fleet, within_s)]
    # While the worker for it starts, it stays wanted; those that start for other reasons come first.
    if late and (fleet.alive == wanted + 1 if fleet.starting else fleet.alive <= wanted):
        wanted += 1
        reasons.append(f"the oldest job has waited {max(late):.0f} s: one more worker")
    return wanted, reasons


def _late(load: SignatureLoad, fleet: Fleet, within_s: float) -> bool:
    """Return whether a job has waited too long on workers that serve it, and none became ready since it was late."""
    times = (fleet.serving or {}).get(load.model)
    if times is None:
        return False
    late_s = min(load.waiting_s, times.first_s) - LATE_FACTOR * within_s
    return late_s > 0 and times.last_s >= late_s


def _slots(load: SignatureLoad) -> int:
    return load.queued_slots + load.bulk_slots + load.running_slots


def _seconds(loads: Sequence[SignatureLoad]) -> tuple[float, float]:
    """Return the GPU-seconds of queued and of running jobs of known cost."""
    costs = [(load, cost.seconds) for load in loads if (cost := slot_cost(load)) is not None]
    queued_s = sum((load.work_slots + load.bulk_work_slots) * seconds for load, seconds in costs)
    return queued_s, sum(0.5 * load.running_slots * seconds for load, seconds in costs)


def _names(models: Sequence[str]) -> str:
    return ", ".join(models[:3]) + (f" and {len(models) - 3} more" if len(models) > 3 else "")
