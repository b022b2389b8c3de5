"""How many workers are wanted: pure functions of what is queued, what it costs, and the workers alive."""

from shared.autoscaling.backlog import Backlog, DatedSlots, LimitedTenant, SignatureLoad, unpaused_slots
from shared.autoscaling.wanted import Fleet, ReadyTimes, Scale, Targets, wanted_workers

__all__ = [
    "Backlog",
    "DatedSlots",
    "Fleet",
    "LimitedTenant",
    "ReadyTimes",
    "Scale",
    "SignatureLoad",
    "Targets",
    "unpaused_slots",
    "wanted_workers",
]
