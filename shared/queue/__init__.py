"""The queue: the only place that speaks to its Redis."""

from shared.queue.batches import Piece
from shared.queue.event_feed import EventFeed
from shared.queue.queue import Queue
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
from shared.queue.webhooks import Attempt, Delivery, Due

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
