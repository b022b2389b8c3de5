"""Workers that bulk jobs need: as many as end each of them within its window."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shared.autoscaling.backlog import Backlog, DatedSlots, SignatureLoad, SlotCost, slot_cost

SOONEST = 1 / 8
"""Jobs older than the default window are due within this part of it. Otherwise the old jobs of one tenant at its limit
would make all younger ones due at once."""


class DueWork(NamedTuple):
    """GPU-seconds that are to have ended within `due_s`."""

    due_s: float
    seconds: float


def bulk_share(backlog: Backlog, window_s: float, start_s: float) -> float:
    """Return the workers that end all bulk jobs of known cost in time, after a start of `start_s`.

    Jobs with a deadline are due then, others `window_s` after their arrival, but none sooner than after another start.
    """
    costs: dict[str, list[tuple[SignatureLoad, SlotCost]]] = {}
    for load in backlog.loads:
        if load.bulk_work_slots and (cost := slot_cost(load)) is not None:
            costs.setdefault(load.model, []).append((load, cost))
    works: list[DueWork] = []
    for model, known in costs.items():
        slots = sum(load.bulk_work_slots for load, _ in known)
        mean_s, rows = (sum(load.bulk_work_slots * cost[at] for load, cost in known) / slots for at in (0, 1))
        dated = [one for one in backlog.dated if one.model == model]
        due = [(max(due_s - start_s, start_s), count) for due_s, count in _due_slots(dated, known, slots, window_s)]
        work = [DueWork(due_s, count * mean_s) for due_s, count in due]
        part = _usable_part(backlog, model, slots, rows, _workers(work))
        works += [DueWork(one.due_s, one.seconds * part) for one in work]
    return _workers(works)


def _due_slots(
    dated: Sequence[DatedSlots], loads: Sequence[tuple[SignatureLoad, SlotCost]], slots: float, window_s: float
) -> Iterator[tuple[float, float]]:
    """Yield the seconds until bulk slots of a model are due, and their number.

    `slots` are all queued ones, as far as their work is left. Those in `dated` come from a sample, which can exceed
    them.
    """
    sampled = sum(one.queued for one in dated)
    scale = min(1.0, slots / sampled) if sampled else 0.0
    for one in dated:
        yield one.due_s, one.queued * scale + one.in_files
    without_deadline = 1 - sampled * scale / slots
    for load, _ in loads:
        yield max(window_s - load.bulk_age_s, window_s * SOONEST), load.bulk_work_slots * without_deadline


def _usable_part(backlog: Backlog, model: str, slots: float, rows: float, workers: float) -> float:
    """Return the part of a model's bulk work that counts: that of a tenant only as far as its limit fills `workers`."""
    in_files = {one.tenant: 0.0 for one in backlog.dated}
    for one in backlog.dated:
        in_files[one.tenant] += one.in_files if one.model == model else 0.0
    total, beyond = slots + sum(in_files.values()), 0.0
    for tenant in backlog.limited if workers else ():
        if own := tenant.bulk_slots.get(model, 0.0):
            share = min(1.0, (own + in_files.get(tenant.name, 0.0)) / total)
            usable = (tenant.limit and max(1.0, tenant.limit / rows)) * own / sum(tenant.bulk_slots.values())
            beyond += max(0.0, share - usable / workers)
    return max(0.0, 1 - beyond)


def _workers(works: Sequence[DueWork]) -> float:
    """Return the least workers that end all work in time, the earliest due first."""
    seconds, workers = 0.0, 0.0
    for work in sorted(works):
        seconds += work.seconds
        workers = max(workers, seconds / work.due_s)
    return workers
