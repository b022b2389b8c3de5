"""The metrics of a worker's single jobs, and of its time."""

from __future__ import annotations

from shared.job import Outcome, State
from shared.queue import Claim
from shared.runtime import metrics
from worker.engine import EngineIncident, ThreadTime


def claimed(claim: Claim) -> None:
    """Count a claim, and what it waited for."""
    attempt = "solo" if claim.solo else "first" if claim.attempt == 1 else "again"
    metrics.claims.labels(attempt).inc()
    metrics.queue_wait_seconds.labels(claim.job.priority.value).observe(claim.waited_ms / 1000)


def settled(claim: Claim, outcome: Outcome) -> None:
    """Count a job that ended."""
    metrics.jobs_ended.labels(claim.job.model, outcome.state.value).inc()
    if outcome.error is not None:
        metrics.job_failures.labels(outcome.error.code).inc()
    steps, inference_ms = outcome.progress.total // max(1, claim.job.n), outcome.timings.inference_ms
    if outcome.state is State.SUCCEEDED and steps and inference_ms is not None:
        metrics.step_seconds.labels(claim.job.model).observe(inference_ms / 1000 / steps)


def given_up(reason: str) -> None:
    """Count a claim that ended in no settling by this worker."""
    metrics.claims_abandoned.labels(reason).inc()


def incident(incident: EngineIncident) -> None:
    """Count what the engine met with."""
    match incident.kind:
        case "model_loaded":
            metrics.model_load_seconds.labels(incident.model).observe(incident.amount)
        case "model_load_failed":
            metrics.model_loads_failed.labels(incident.model).inc(incident.amount)
        case "out_of_memory":
            metrics.out_of_memory.labels(incident.model).inc(incident.amount)
        case "forward_repeated":
            metrics.forwards_retried.labels(incident.model).inc(incident.amount)


class Spent:
    """Brings the counters of the GPU thread's time up to what it has spent."""

    def __init__(self) -> None:
        self._told = ThreadTime()

    def show(self, spent: ThreadTime) -> None:
        """Add what has been spent since the last call."""
        metrics.gpu_busy_seconds.inc(max(0.0, spent.busy_s - self._told.busy_s))
        idle_s = spent.idle_while_queued_s - self._told.idle_while_queued_s
        metrics.gpu_idle_while_queued_seconds.inc(max(0.0, idle_s))
        self._told = spent
