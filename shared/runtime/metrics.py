"""Every Prometheus metric of fusequeue, declared once; none is labelled by a job, a tenant or a client's words."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

if TYPE_CHECKING:
    from shared.autoscaling import Scale
    from shared.queue import QueueDepth, WorkerInfo

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

REGISTRY = CollectorRegistry()
ProcessCollector(registry=REGISTRY)
PlatformCollector(registry=REGISTRY)

_REQUEST_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_WAIT_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900, 3600)
_ROWS_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)

# The API's.

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
dead_letters = Gauge(
    "fusequeue_dead_letters", "Jobs that were given up and are kept to be looked at.", registry=REGISTRY
)
event_lag_seconds = Histogram(
    "fusequeue_event_lag_seconds",
    "From a change of a job's state, by the clock of Redis, until this API hands it out.",
    buckets=_REQUEST_BUCKETS_S,
    registry=REGISTRY,
)
workers_wanted = Gauge(
    "fusequeue_workers_wanted", "Workers that the pool wants, as of the last scrape.", registry=REGISTRY
)
workers_alive = Gauge(
    "fusequeue_workers", "Workers that are alive, by what they say of themselves.", ("state",), registry=REGISTRY
)
backlog_seconds = Gauge(
    "fusequeue_backlog_seconds",
    "GPU-seconds that wait and run, counted as fused, as of the last scrape.",
    registry=REGISTRY,
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

# A worker's.
forward_rows = Histogram(
    "fusequeue_forward_rows",
    "Pictures in a denoiser forward, guidance's doubling not counted.",
    ("model",),
    buckets=_ROWS_BUCKETS,
    registry=REGISTRY,
)
forward_seconds = Histogram(
    "fusequeue_forward_seconds",
    "Time of a denoiser forward, by the pictures in it.",
    ("model", "rows"),
    buckets=_REQUEST_BUCKETS_S,
    registry=REGISTRY,
)
step_seconds = Histogram(
    "fusequeue_step_seconds",
    "Time in the engine of a job that succeeded, over its steps: what was set aside and decoding are in it.",
    ("model",),
    buckets=_REQUEST_BUCKETS_S,
    registry=REGISTRY,
)
batches = Counter(
    "fusequeue_batches_total",
    "Batches, from a signature's first job in the engine to its last one leaving, by why they held no more.",
    ("model", "stopped_by"),
    registry=REGISTRY,
)
kept_apart = Counter(
    "fusequeue_kept_apart_total",
    "Batches that began with a job that had waited while another with room ran, by the fields in which they differ.",
    ("field",),
    registry=REGISTRY,
)
queue_wait_seconds = Histogram(
    "fusequeue_queue_wait_seconds",
    "From a job's arrival in line to its claim.",
    ("priority",),
    buckets=_WAIT_BUCKETS_S,
    registry=REGISTRY,
)
claims = Counter(
    "fusequeue_claims_total",
    "Claims: of jobs that are new, that come again, or that run alone since they were lost.",
    ("attempt",),
    registry=REGISTRY,
)
jobs_ended = Counter("fusequeue_jobs_ended_total", "Jobs settled.", ("model", "state"), registry=REGISTRY)
job_failures = Counter("fusequeue_job_failures_total", "Jobs settled with an error.", ("code",), registry=REGISTRY)
jobs_given_up = Counter(
    "fusequeue_jobs_given_up_total",
    "Claims that ended otherwise: lost to another, or given back.",
    ("reason",),
    registry=REGISTRY,
)
leases_ran_out = Counter(
    "fusequeue_leases_ran_out_total", "Jobs whose lease ran out, put back in line by this worker.", registry=REGISTRY
)
encode_seconds = Histogram(
    "fusequeue_encode_seconds", "Time to encode a picture or video.", buckets=_REQUEST_BUCKETS_S, registry=REGISTRY
)
upload_seconds = Histogram(
    "fusequeue_upload_seconds",
    "Time until storage has a picture or video, retries included.",
    buckets=_REQUEST_BUCKETS_S,
    registry=REGISTRY,
)
spool_bytes = Gauge("fusequeue_spool_bytes", "Finished pictures held until storage has them.", registry=REGISTRY)
spool_limit_bytes = Gauge(
    "fusequeue_spool_limit_bytes", "When so many are held, nothing is claimed.", registry=REGISTRY
)
out_of_memory = Counter(
    "fusequeue_out_of_memory_total",
    "Forwards that ran out of memory and were retried smaller.",
    ("model",),
    registry=REGISTRY,
)
forwards_repeated = Counter(
    "fusequeue_forwards_repeated_total",
    "Forwards that failed and were retried in parts.",
    ("model",),
    registry=REGISTRY,
)
gpu_busy_seconds = Counter(
    "fusequeue_gpu_busy_seconds_total", "Time in which the GPU thread had pictures to go on with.", registry=REGISTRY
)
gpu_idle_while_waiting_seconds = Counter(
    "fusequeue_gpu_idle_while_waiting_seconds_total",
    "Time in which it had none while jobs that it then got stood in line.",
    registry=REGISTRY,
)
model_load_seconds = Histogram(
    "fusequeue_model_load_seconds",
    "Time to load a model, from its files to the first job it may serve; its count is that of the loads.",
    ("model",),
    buckets=_WAIT_BUCKETS_S,
    registry=REGISTRY,
)
model_loads_failed = Counter(
    "fusequeue_model_loads_failed_total", "Loads that failed, their jobs with them.", ("model",), registry=REGISTRY
)
running_seats = Gauge("fusequeue_running_seats", "Pictures in the engine now.", registry=REGISTRY)
worker_ready = Gauge(
    "fusequeue_worker_ready", "1 while the worker is warm, claims, and Redis answers.", registry=REGISTRY
)
gpu_memory_bytes = Gauge(
    "fusequeue_gpu_memory_bytes", "Memory of this worker's GPU, by NVML.", ("kind",), registry=REGISTRY
)
gpu_utilisation = Gauge(
    "fusequeue_gpu_utilisation_ratio",
    "Share of time in which a kernel ran on this worker's GPU, by NVML.",
    registry=REGISTRY,
)

_ROWS_LABELS = ((1, "1"), (2, "2"), (4, "3-4"), (8, "5-8"), (16, "9-16"), (32, "17-32"))


def rows_label(rows: int) -> str:
    """Return the bucket of a forward's rows, as it is labelled."""
    return next((label for most, label in _ROWS_LABELS if rows <= most), "33+")


def names() -> frozenset[str]:
    """Return the name of every series that this process may show, labels apart."""
    found = set()
    for metric in REGISTRY.collect():
        endings = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(metric.type, ("",))
        found |= {metric.name + ending for ending in endings}
    return frozenset(found)


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
    for gauge in (worker_busy_seconds, worker_idle_while_waiting_seconds, workers_alive):
        gauge.clear()
    for worker in workers:
        workers_alive.labels(worker.state).inc()
        worker_busy_seconds.labels(worker.id).set(worker.busy_s)
        worker_idle_while_waiting_seconds.labels(worker.id).set(worker.idle_while_waiting_s)


def show_scale(scale: Scale | None, dead: int | None) -> None:
    """Set the gauges of how many workers are wanted, and of dead letters; None, what is not known, is shown as NaN."""
    workers_wanted.set(math.nan if scale is None else scale.wanted)
    backlog_seconds.set(math.nan if scale is None else scale.waiting_s + scale.running_s)
    dead_letters.set(math.nan if dead is None else dead)
