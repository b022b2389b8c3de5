"""What waits in the queue: what a slot costs, and how many slots quotas let start."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class SignatureLoad:
    """Queued and running slots of one signature, and their cost.

    `queued_slots` are those of interactive and standard jobs; the oldest of these that no quota holds back has waited
    for `waiting_s`. `bulk_slots` are those of bulk jobs, the oldest of which has waited for `bulk_age_s`. `slot_s` are
    GPU-seconds of one slot in forwards of `rows` rows on average, None if not measured yet. `cost_curve` holds seconds
    per forward by rows. Of the work of queued slots, checkpoints spare that of `spared_slots` and of
    `spared_bulk_slots`.
    """

    signature: str
    model: str
    queued_slots: int = 0
    bulk_slots: int = 0
    running_slots: int = 0
    oldest_wait_s: float = 0.0
    waiting_s: float = 0.0
    bulk_age_s: float = 0.0
    slot_s: float | None = None
    rows: float = 1.0
    cost_curve: Mapping[int, float] | None = None
    spared_slots: float = 0.0
    spared_bulk_slots: float = 0.0

    @property
    def work_slots(self) -> float:
        """The work that is left of queued interactive and standard jobs, in slots that begin anew."""
        return max(0.0, self.queued_slots - self.spared_slots)

    @property
    def bulk_work_slots(self) -> float:
        return max(0.0, self.bulk_slots - self.spared_bulk_slots)


@dataclass(frozen=True)
class LimitedTenant:
    """A tenant with more queued jobs than its limit of running slots lets start.

    `queued_slots` are those of its interactive and standard jobs by model, `bulk_slots` those of its bulk jobs.
    """

    name: str
    limit: float
    running: float
    queued_slots: Mapping[str, float]
    bulk_slots: Mapping[str, float]


@dataclass(frozen=True)
class DatedSlots:
    """Bulk slots of a model and tenant with deadlines: queued ones, and lines in batch files.

    `due_s` is their slack: they are to start within it.
    """

    model: str
    tenant: str
    due_s: float
    queued: float = 0.0
    in_files: float = 0.0


@dataclass(frozen=True)
class Backlog:
    """All that waits: `dated` are the bulk slots that have a deadline of their own."""

    loads: Sequence[SignatureLoad] = ()
    limited: Sequence[LimitedTenant] = ()
    dated: Sequence[DatedSlots] = ()


class SlotCost(NamedTuple):
    """GPU-seconds of a slot in forwards of `rows` rows."""

    seconds: float
    rows: float


def slot_cost(load: SignatureLoad, startable: float = 1.0) -> SlotCost | None:
    """Return the expected cost of a queued slot, in forwards as full as the queue allows; None if it is unknown.

    A row of an r-row forward costs curve(r) / r. The measured `slot_s` is scaled from its own mean rows to the best
    r that the queue can fill with the `startable` part of its interactive and standard slots.
    """
    if load.slot_s is None:
        return None
    curve = {rows: seconds for rows, seconds in (load.cost_curve or {}).items() if rows > 0 and seconds > 0}
    if not curve:
        return SlotCost(load.slot_s, load.rows)
    most = max(load.queued_slots * startable + load.bulk_slots, min(curve))
    rows = min((rows for rows in curve if rows <= most), key=lambda r: curve[r] / r)
    nearest = min(curve, key=lambda count: (abs(count - load.rows), count))  # to the measured mean rows
    change = curve[rows] / rows / (curve[nearest] / nearest)
    return SlotCost(load.slot_s * change, float(rows)) if change < 1 else SlotCost(load.slot_s, load.rows)


def unpaused_slots(backlog: Backlog) -> dict[str, float]:
    """Return the queued slots by model, without those of paused tenants, which are estimates."""
    queued = defaultdict[str, float](float)
    for load in backlog.loads:
        queued[load.model] += load.queued_slots + load.bulk_slots
    for tenant in backlog.limited:
        if tenant.limit == 0:
            for model, slots in (*tenant.queued_slots.items(), *tenant.bulk_slots.items()):
                queued[model] -= slots
    return {model: slots if slots >= 0.5 else 0.0 for model, slots in queued.items()}


def startable_parts(backlog: Backlog) -> dict[str, float]:
    """Return by model the part of its queued interactive and standard slots that quotas let start now."""
    queued, beyond = defaultdict[str, float](float), defaultdict[str, float](float)
    for load in backlog.loads:
        queued[load.model] += load.queued_slots
    for tenant in backlog.limited:
        own, free = sum(tenant.queued_slots.values()), max(0.0, tenant.limit - tenant.running)
        for model, slots in tenant.queued_slots.items():
            beyond[model] += slots * (1 - free / own) if own > free else 0.0
    return {model: max(0.0, 1 - beyond[model] / slots) if slots else 1.0 for model, slots in queued.items()}
