"""The queue: the only place that speaks to its Redis."""

from shared.queue.client import QueueClient
from shared.queue.events import EventFeed
from shared.queue.order.position import QueuePosition
from shared.queue.queue import Queue
from shared.queue.records import (
    Claim,
    CostCurve,
    DeadLetter,
    ExpiredItem,
    JobEvent,
    ModelDepth,
    ProgressReport,
    QueueDepth,
    QueueLoad,
    Submission,
    SubmitResult,
    UnavailableModel,
    WorkerInfo,
)

__all__ = [
    "Claim",
    "CostCurve",
    "DeadLetter",
    "EventFeed",
    "ExpiredItem",
    "JobEvent",
    "ModelDepth",
    "ProgressReport",
    "Queue",
    "QueueClient",
    "QueueDepth",
    "QueueLoad",
    "QueuePosition",
    "Submission",
    "SubmitResult",
    "UnavailableModel",
    "WorkerInfo",
]
