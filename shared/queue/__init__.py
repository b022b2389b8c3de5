"""The queue: the only place that speaks to its Redis."""

from shared.queue.backfills import Piece
from shared.queue.facade import Queue
from shared.queue.feed import EventFeed
from shared.queue.hooks import Attempt, Delivery, Due
from shared.queue.values import (
    Claim,
    DeadLetter,
    Doomed,
    Event,
    Place,
    QueueDepth,
    Renewal,
    Report,
    Submission,
    Submitted,
    WorkerInfo,
)

__all__ = [
    "Attempt",
    "Claim",
    "DeadLetter",
    "Delivery",
    "Doomed",
    "Due",
    "Event",
    "EventFeed",
    "Piece",
    "Place",
    "Queue",
    "QueueDepth",
    "Renewal",
    "Report",
    "Submission",
    "Submitted",
    "WorkerInfo",
]
