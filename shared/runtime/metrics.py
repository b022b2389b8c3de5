"""Every Prometheus metric of fusequeue. No label holds a job, a tenant or text of a client."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

REGISTRY = CollectorRegistry()
ProcessCollector(registry=REGISTRY)
PlatformCollector(registry=REGISTRY)

_counter = partial(Counter, namespace="fusequeue", registry=REGISTRY)
_gauge = partial(Gauge, namespace="fusequeue", registry=REGISTRY)
_histogram = partial(Histogram, namespace="fusequeue", registry=REGISTRY)
_times = partial(_histogram, buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60))
_long_times = partial(_histogram, buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900, 3600))
_rows = partial(_histogram, buckets=(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128))


class _Total:
    """A counter that Redis keeps; it has no sample until `value` is known."""

    def __init__(self, name: str, documentation: str) -> None:
        self.value: int | None = None
        self._name, self._documentation = f"fusequeue_{name}", documentation
        REGISTRY.register(self)

    def collect(self) -> Iterable[CounterMetricFamily]:
        yield CounterMetricFamily(self._name, self._documentation, value=self.value)


# API
http_requests = _counter("http_requests_total", "HTTP responses.", ("method", "route", "status"))
http_request_seconds = _times("http_request_seconds", "Time to the end of the response.", ("route",))
http_in_flight = _gauge("http_requests_in_flight", "HTTP requests in flight.")
http_connections = _gauge("http_connections", "Open HTTP connections.")
http_connections_closed = _counter(
    "http_connections_closed_total",
    "Connections closed by a limit: process_limit, address_limit, evicted, slow_head, slow_body, unread, invalid.",
    ("reason",),
)
submits = _counter(
    "submits_total", "Submitted jobs by outcome: accepted, replayed, or an error code.", ("model", "outcome")
)
quota_refusals = _counter("quota_refusals_total", "Jobs, inputs and files that a tenant's quota refused.", ("quota",))
bulk_lines = _counter("bulk_lines_total", "Lines of bulk requests.", ("outcome",))
event_subscribers = _gauge("event_subscribers", "Clients subscribed to events of a job.")
waiters_refused = _counter(
    "waiters_refused_total",
    "Streams and waiting requests refused by the limit of the process or of a tenant.",
    ("limit",),
)
event_lag_seconds = _times(
    "event_lag_seconds", "Time from a state change (Redis clock) until this API sends its event."
)

# API and chores; those of the chores are not exported
shared_in_use = _gauge("shared_in_use", "Use of a bounded resource that tenants share.", ("resource",))
share_refusals = _counter("share_refusals_total", "Requests refused for want of such a resource.", ("resource",))

# API, worker and chores
trace_spans = _counter(
    "trace_spans_total",
    "Spans of traces: ended, sent, or failed to be sent. Those ended beyond the other two are queued, or were dropped.",
    ("outcome",),
)

# API: queue and workers, read from Redis at each scrape
queued_jobs = _gauge("queued_jobs", "Queued jobs.", ("model", "priority"))
waiting_jobs = _gauge("waiting_jobs", "Jobs for later.")
startable_slots = _gauge("startable_slots", "Queued slots that no pause holds back.", ("model",))
running_jobs = _gauge("running_jobs", "Running jobs.", ("model",))
oldest_queued_seconds = _gauge("oldest_queued_seconds", "Age of the oldest queued job.", ("model",))
oldest_wait_seconds = _gauge(
    "oldest_wait_seconds", "Age of the oldest interactive or standard job that no quota holds back.", ("model",)
)
kept_jobs = _gauge("kept_jobs", "Records of jobs, ended ones included.")
record_bytes = _gauge("record_bytes", "Redis memory of all records of tenants, estimated.")
stored_objects = _gauge("stored_objects", "Inputs, results and file parts in storage.")
stored_bytes = _gauge("stored_bytes", "Bytes of those objects.")
dead_letters = _gauge("dead_letters", "Dead letters.")
dead_letters_added = _Total("dead_letters_added", "Dead letters since the queue began, also those that are gone.")
chore_age_seconds = _gauge(
    "chore_age_seconds",
    "Time since a periodic chore ended without an error; infinite if it never did, 0 without work.",
    ("chore",),
)
workers_wanted = _gauge("workers_wanted", "Workers that are wanted.")
workers_alive = _gauge("workers", "Live workers by reported state.", ("state",))
model_workers = _gauge(
    "model_workers", "Live workers by model: ready, starting, draining, or unavailable to it.", ("model", "state")
)
target_wait_seconds = _gauge("target_wait_seconds", "Wait that workers_wanted aims at, or a usual start if longer.")
backlog_seconds = _gauge("backlog_seconds", "GPU-seconds of queued and running jobs, when fused.")
worker_busy_seconds = _gauge("worker_busy_seconds", "Time a worker's GPU thread had work.", ("worker",))
worker_idle_while_queued_seconds = _gauge(
    "worker_idle_while_queued_seconds",
    "Time a worker's GPU thread had no work while jobs it later ran were queued.",
    ("worker",),
)

# Worker
forward_rows = _rows("forward_rows", "Images in a denoiser forward, before guidance doubling.", ("model",))
forward_seconds = _times("forward_seconds", "Time of a denoiser forward, by its images.", ("model", "rows"))
step_seconds = _times(
    "step_seconds",
    "Time in the engine per computed step of a succeeded job, including preemption and decoding.",
    ("model",),
)
# The usage of all tenants. A tenant is no label: each one would add series for good; `GET /v1/usage` has tenants.
device_seconds = _counter("device_seconds_total", "Device time of runs, when they end.", ("model",))
images = _counter("images_total", "Images of succeeded jobs.", ("model",))
videos = _counter("videos_total", "Videos of succeeded jobs.", ("model",))
output_bytes = _counter("output_bytes_total", "Bytes of those images and videos.", ("model",))
computed_steps = _counter("computed_steps_total", "Denoising steps computed, over all images.", ("model",))
skipped_steps = _counter(
    "skipped_steps_total", "Denoising steps that step caching answered without a forward.", ("model",)
)
batches = _counter(
    "batches_total",
    "Batches by what limited them. A batch lasts from the first job of a signature to the end of its last.",
    ("model", "stopped_by"),
)
batch_mismatches = _counter(
    "batch_mismatches_total",
    "Batches whose first job waited while another batch had free slots, by the fields that differ.",
    ("field",),
)
queue_wait_seconds = _long_times("queue_wait_seconds", "Time from submission to claim.", ("priority",))
claims = _counter("claims_total", "Claims by attempt: first, again, or solo (after the job was lost).", ("attempt",))
jobs_ended = _counter("jobs_ended_total", "Settled jobs.", ("model", "state"))
job_failures = _counter("job_failures_total", "Jobs settled with an error.", ("code",))
claims_abandoned = _counter("claims_abandoned_total", "Claims that ended unsettled: lost or released.", ("reason",))
leases_expired = _counter("leases_expired_total", "Jobs requeued by this worker after their lease expired.")
checkpoints_written = _counter("checkpoints_written_total", "Checkpoints of jobs stored.", ("model",))
checkpoints_resumed = _counter("checkpoints_resumed_total", "Runs that continued from a checkpoint.", ("model",))
checkpoints_refused = _counter(
    "checkpoints_refused_total",
    "Checkpoints that could not be used: not `stored`, not `read`, or refused by the engine (`resume`).",
    ("reason",),
)
encode_seconds = _times("encode_seconds", "Time to encode an image or video.")
upload_seconds = _times("upload_seconds", "Time to store an image or video, including retries.")
spool_bytes = _gauge("spool_bytes", "Finished images waiting for storage.")
spool_limit_bytes = _gauge("spool_limit_bytes", "Spool size at which claiming stops.")
out_of_memory = _counter("out_of_memory_total", "Forwards retried in parts after running out of memory.", ("model",))
forwards_retried = _counter("forwards_retried_total", "Failed forwards retried in parts.", ("model",))
gpu_busy_seconds = _counter("gpu_busy_seconds_total", "Time the GPU thread had work.")
gpu_idle_while_queued_seconds = _counter(
    "gpu_idle_while_queued_seconds_total", "Time the GPU thread had no work while jobs it later ran were queued."
)
model_load_seconds = _long_times("model_load_seconds", "Time to load a model, until it can run jobs.", ("model",))
model_copy_seconds = _long_times("model_copy_seconds", "Time to copy a model back from CPU memory.", ("model",))
model_loads_failed = _counter("model_loads_failed_total", "Failed model loads.", ("model",))
running_slots = _gauge("running_slots", "Images in the engine.")
worker_ready = _gauge("worker_ready", "1 while the worker is warm, claims jobs and reaches Redis.")
worker_without_gpu = _gauge(
    "worker_without_gpu", "1 while the worker computes on the CPU although FUSEQUEUE_DEVICE is unset."
)
gpu_memory_bytes = _gauge("gpu_memory_bytes", "GPU memory, from NVML.", ("kind",))
gpu_utilisation = _gauge("gpu_utilisation_ratio", "Share of time with a running kernel, from NVML.")

_ROWS_LABELS = ((1, "1"), (2, "2"), (4, "3-4"), (8, "5-8"), (16, "9-16"), (32, "17-32"))


def rows_label(rows: int) -> str:
    """Return the `rows` label of a forward."""
    return next((label for limit, label in _ROWS_LABELS if rows <= limit), "33+")


def names() -> frozenset[str]:
    """Return the name of every series, without labels."""
    series = set()
    for metric in REGISTRY.collect():
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(metric.type, ("",))
        series |= {metric.name + suffix for suffix in suffixes}
    return frozenset(series)


def exposition() -> bytes:
    """Return all metrics of this process in Prometheus' text format."""
    return generate_latest(REGISTRY)
