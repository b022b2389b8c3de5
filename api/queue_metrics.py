"""The gauges of the whole queue, which any API process can show."""

import math
from collections.abc import Iterable, Mapping

from prometheus_client import Gauge

from shared.auth import Footprint
from shared.autoscaling import Scale
from shared.queue import QueueLoad, WorkerInfo
from shared.runtime import metrics


def show_load(load: QueueLoad, startable: Mapping[str, float]) -> None:
    """Set the gauges of queued and running jobs; `startable` are queued slots by model that no pause holds back."""
    for gauge in (
        *(metrics.queued_jobs, metrics.startable_slots, metrics.running_jobs),
        *(metrics.oldest_queued_seconds, metrics.oldest_wait_seconds),
    ):
        gauge.clear()
    for name, slots in startable.items():
        metrics.startable_slots.labels(name).set(slots)
    for model in load.models:
        for priority, jobs in model.jobs.items():
            metrics.queued_jobs.labels(model.model, priority.value).set(jobs)
        metrics.running_jobs.labels(model.model).set(model.running_jobs)
    _show_oldest(metrics.oldest_queued_seconds, [(depth.model, depth.oldest_age_ms) for depth in load.depths])
    _show_oldest(metrics.oldest_wait_seconds, [(depth.model, depth.waiting_ms) for depth in load.depths])


def _show_oldest(gauge: Gauge, ages_ms: Iterable[tuple[str, int | None]]) -> None:
    oldest: dict[str, int] = {}
    for model, age_ms in ages_ms:
        oldest[model] = max(oldest.get(model, 0), age_ms or 0)
    for model, age_ms in oldest.items():
        gauge.labels(model).set(age_ms / 1000)


def show_workers(workers: Iterable[WorkerInfo]) -> None:
    """Set the gauges of live workers."""
    for gauge in (
        *(metrics.worker_busy_seconds, metrics.worker_idle_while_queued_seconds),
        *(metrics.workers_alive, metrics.model_workers),
    ):
        gauge.clear()
    for worker in workers:
        metrics.workers_alive.labels(worker.state).inc()
        metrics.worker_busy_seconds.labels(worker.id).set(worker.busy_s)
        metrics.worker_idle_while_queued_seconds.labels(worker.id).set(worker.idle_while_queued_s)
        for model in worker.models:
            metrics.model_workers.labels(model, worker.state_of(model)).inc()


def show_chores(ages_s: Mapping[str, float]) -> None:
    """Set the gauges of periodic chores."""
    metrics.chore_age_seconds.clear()
    for chore, age_s in ages_s.items():
        metrics.chore_age_seconds.labels(chore).set(age_s)


def show_footprint(footprint: Footprint | None) -> None:
    """Set the gauges of what all tenants keep; None (unknown) becomes NaN."""
    metrics.kept_jobs.set(math.nan if footprint is None else footprint.kept_jobs)
    metrics.record_bytes.set(math.nan if footprint is None else footprint.record_bytes)
    metrics.stored_objects.set(math.nan if footprint is None else footprint.stored_objects)
    metrics.stored_bytes.set(math.nan if footprint is None else footprint.stored_bytes)


def show_scale(scale: Scale | None, dead: int | None, waiting: int | None) -> None:
    """Set the gauges of wanted workers, dead letters and jobs for later; None (unknown) becomes NaN."""
    metrics.workers_wanted.set(math.nan if scale is None else scale.wanted)
    metrics.backlog_seconds.set(math.nan if scale is None else scale.queued_s + scale.running_s)
    metrics.waiting_jobs.set(math.nan if waiting is None else waiting)
    metrics.dead_letters.set(math.nan if dead is None else dead)
