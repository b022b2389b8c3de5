"""The queue: the only place that speaks to its Redis."""

from shared.queue.batches import BatchUpdate
from shared.queue.client import QueueClient
from shared.queue.events import EventFeed
from shared.queue.queue import Queue
from shared.queue.records import (
    Claim,
    DeadLetter,
    ExpiredItem,
    JobEvent,
    ProgressReport,
    QueueDepth,
    QueuePosition,
    Renewal,
    Submission,
    SubmitResult,
    WorkerInfo,
)
from shared.queue.webhooks import DeliveryAttempt, DueDelivery, WebhookDelivery

__all__ = [
    "BatchUpdate",
    "Claim",
    "DeadLetter",
    "DeliveryAttempt",
    "DueDelivery",
    "EventFeed",
    "ExpiredItem",
    "JobEvent",
    "ProgressReport",
    "Queue",
    "QueueClient",
    "QueueDepth",
    "QueuePosition",
    "Renewal",
    "Submission",
    "SubmitResult",
    "WebhookDelivery",
    "WorkerInfo",
]
