"""Why a queued job waits, from what its tenant may know: no other tenant's jobs and no worker is named."""

from collections.abc import Sequence

from shared.queue.order.position import QueueReason
from shared.queue.records import WorkerInfo


def queue_reason(reason: QueueReason, model: str, workers: Sequence[WorkerInfo]) -> QueueReason:
    """Return why a job of `model` waits: `reason`, or a reason before it of its workers; `workers` are those alive."""
    if reason in (QueueReason.PAUSED, QueueReason.WAITING):
        return reason
    serving = [worker for worker in workers if worker.serves(model)]
    if not serving:
        return _without_worker(model, workers)
    if reason in (QueueReason.TENANT_LIMIT, QueueReason.BATCH_MATES):
        return reason
    if not any(model in worker.loaded for worker in serving):
        return QueueReason.MODEL_LOADING
    return reason


def _without_worker(model: str, workers: Sequence[WorkerInfo]) -> QueueReason:
    alive = [worker for worker in workers if model in worker.models]
    if any(worker.state == "starting" and worker.may_serve(model) for worker in alive):
        return QueueReason.WORKER_STARTING
    if any(worker.state != "draining" for worker in alive):
        return QueueReason.MODEL_UNAVAILABLE
    return QueueReason.WORKERS_DRAINING if alive else QueueReason.NO_WORKER
