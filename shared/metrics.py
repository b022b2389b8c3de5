"""Every Prometheus metric of fusequeue, declared once; none is labelled by a job, a tenant or a client's words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

if TYPE_CHECKING:
    from shared.queue import QueueDepth, WorkerInfo

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

REGISTRY = CollectorRegistry()
ProcessCollector(registry=REGISTRY)
PlatformCollector(registry=REGISTRY)

_REQUEST_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

http_requests = Counter(
    "fusequeue_http_requests_total", "Requests answered.", ("method", "route", "status"), registry=REGISTRY
)
http_request_seconds = Histogram(
    "fusequeue_http_request_seconds",
    "Time from a request's head to the end of its answer.",
    ("route",),
    buckets=_REQUEST_BUCKETS_S,
    registry=REGISTRY,
)
http_in_flight = Gauge("fusequeue_http_requests_in_flight", "Requests being answered.", registry=REGISTRY)
submits = Counter(
    "fusequeue_submits_total",
    "Jobs submitted, by outcome: accepted, replayed, or the code of the error.",
    ("model", "outcome"),
    registry=REGISTRY,
)
bulk_lines = Counter("fusequeue_bulk_lines_total", "Lines of bulk requests.", ("outcome",), registry=REGISTRY)
streams = Gauge("fusequeue_event_streams", "Clients subscribed to events of a job.", registry=REGISTRY)
waiting_jobs = Gauge(
    "fusequeue_waiting_jobs", "Jobs that wait, as of the last scrape.", ("model", "priority"), registry=REGISTRY
)
running_jobs = Gauge("fusequeue_running_jobs", "Jobs that run, as of the last scrape.", ("model",), registry=REGISTRY)
oldest_waiting_seconds = Gauge(
    "fusequeue_oldest_waiting_seconds", "Age of the oldest waiting job.", ("model",), registry=REGISTRY
)
# By worker: they are cleared at each scrape, so there are as many as workers are alive.
worker_busy_seconds = Gauge(
    "fusequeue_worker_busy_seconds",
    "For how long the worker's GPU thread has had pictures to go on with, since its start.",
    ("worker",),
    registry=REGISTRY,
)
worker_idle_while_waiting_seconds = Gauge(
    "fusequeue_worker_idle_while_waiting_seconds",
    "For how long it has had none while jobs that it then got stood in line, since its start.",
    ("worker",),
    registry=REGISTRY,
)


def exposition() -> bytes:
    """Return all metrics of this process as Prometheus reads them."""
    return generate_latest(REGISTRY)


def show_depths(depths: Iterable[QueueDepth]) -> None:
    """Set the gauges of the queue to what waits and runs now."""
    for gauge in (waiting_jobs, running_jobs, oldest_waiting_seconds):
        gauge.clear()
    oldest: dict[str, float] = {}
    for depth in depths:
        for priority, jobs in depth.jobs.items():
            waiting_jobs.labels(depth.model, priority.value).inc(jobs)
        running_jobs.labels(depth.model).inc(depth.running)
        oldest[depth.model] = max(oldest.get(depth.model, 0.0), (depth.oldest_age_ms or 0) / 1000)
    for model, age_s in oldest.items():
        oldest_waiting_seconds.labels(model).set(age_s)


def show_workers(workers: Iterable[WorkerInfo]) -> None:
    """Set the gauges of the workers that are alive."""
    worker_busy_seconds.clear()
    worker_idle_while_waiting_seconds.clear()
    for worker in workers:
        worker_busy_seconds.labels(worker.id).set(worker.busy_s)
        worker_idle_while_waiting_seconds.labels(worker.id).set(worker.idle_while_waiting_s)
