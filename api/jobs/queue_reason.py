"""Why a queued job waits, from what its tenant may know: no other tenant's jobs and no worker is named."""

from collections.abc import Sequence
from enum import StrEnum

from shared.queue.records import QueuePosition, WorkerInfo


class QueueReason(StrEnum):
    """Why a job is still queued. The first that applies, in this order."""

    PAUSED = "paused"  # by an operator: its model, its tenant or everything
    NO_WORKER = "no_worker"  # no worker that serves the model is alive
    WORKER_STARTING = "worker_starting"
    MODEL_UNAVAILABLE = "model_unavailable"  # the workers cannot load the model now, and try again
    WORKERS_DRAINING = "workers_draining"
    TENANT_LIMIT = "tenant_limit"  # the tenant's running slots are used up
    BATCH_MATES = "batch_mates"  # the window is not over
    MODEL_LOADING = "model_loading"  # no worker has the model in memory
    IDLE_WORKER = "idle_worker"  # a lost job runs solo, on a worker without other jobs
    JOBS_AHEAD = "jobs_ahead"  # of its signature
    NEXT = "next"  # it starts when a worker has room


def queue_reason(position: QueuePosition, model: str, workers: Sequence[WorkerInfo]) -> QueueReason:
    """Return why a job of `model` waits; `workers` are those alive."""
    if position.paused:
        return QueueReason.PAUSED
    serving = [worker for worker in workers if worker.serves(model)]
    if not serving:
        return _without_worker(model, workers)
    if position.limited:
        return QueueReason.TENANT_LIMIT
    if not position.ready:
        return QueueReason.BATCH_MATES
    if not any(model in worker.loaded for worker in serving):
        return QueueReason.MODEL_LOADING
    if position.must_run_solo:
        return QueueReason.IDLE_WORKER
    return QueueReason.JOBS_AHEAD if position.position else QueueReason.NEXT


def _without_worker(model: str, workers: Sequence[WorkerInfo]) -> QueueReason:
    alive = [worker for worker in workers if model in worker.models]
    if any(worker.state == "starting" and worker.may_serve(model) for worker in alive):
        return QueueReason.WORKER_STARTING
    if any(worker.state != "draining" for worker in alive):
        return QueueReason.MODEL_UNAVAILABLE
    return QueueReason.WORKERS_DRAINING if alive else QueueReason.NO_WORKER
