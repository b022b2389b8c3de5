"""Metrics of a worker and the API, parsed like Prometheus does, and a worker's readiness."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from harness.ports import free_port
from harness.waiting import wait_until
from prometheus_client.parser import text_string_to_metric_families

from shared.runtime import metrics

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(url: str) -> Samples:
    response = httpx.get(f"{url}/metrics", timeout=60)
    assert response.status_code == 200
    families = text_string_to_metric_families(response.text)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def total(samples: Samples, name: str, **labels: str) -> float:
    """Return the sum over all series of a name with these labels."""
    return sum(
        value
        for (sample_name, sample_labels), value in samples.items()
        if sample_name == name and labels.items() <= dict(sample_labels).items()
    )


def readiness(url: str) -> int:
    try:
        return httpx.get(f"{url}/readyz", timeout=60).status_code
    except httpx.TransportError:
        return 0


@pytest.mark.timeout(600)
def test_metrics_match_the_jobs_and_readiness_follows_redis_and_the_drain(make_stack: Callable[..., Any]) -> None:
    """Without Redis, and while it drains, a worker is not ready but still responds."""
    port = free_port()
    stack, worker_url = make_stack(worker_port=str(port)), f"http://127.0.0.1:{port}"
    stack.redis.start()
    stack.api.start()
    wait_until(stack.ready, "the API is ready")
    worker = stack.worker()
    wait_until(lambda: readiness(worker_url) == 200, "the worker is warm", 180)

    check_metrics(stack, worker_url, worker)

    stack.redis.send(signal.SIGSTOP)
    wait_until(lambda: readiness(worker_url) == 503, "the outage of Redis is noticed")
    assert httpx.get(f"{worker_url}/healthz", timeout=60).status_code == 200
    stack.redis.send(signal.SIGCONT)
    wait_until(lambda: readiness(worker_url) == 200, "the worker is ready again")
    wait_until(stack.ready, "the API is ready again")
    job = stack.submit(prompt="a red circle", steps=50)
    wait_until(lambda: stack.job(job)["status"] != "queued", "the job runs")
    worker.send(signal.SIGTERM)
    wait_until(lambda: readiness(worker_url) in (503, 0), "the drain is visible")
    assert worker.process.wait(90) == 0


def check_metrics(stack: Any, worker_url: str, worker: Any) -> None:
    first = stack.submit(prompt="a red circle", steps=4, seed=9, width=96, priority="bulk")
    with stack.client.stream("GET", f"/v1/jobs/{first}/events") as events:  # from a subscriber on, the API reads events
        assert '"status":"succeeded"' in events.read().decode()
    ids = [stack.submit(prompt="a red circle", steps=6, seed=at) for at in range(4)]
    assert {stack.finish(name, 180)["status"] for name in ids} == {"succeeded"}
    samples, api_samples = scrape(worker_url), scrape(stack.url)

    assert total(samples, "fusequeue_jobs_ended_total", model="demo", state="succeeded") == 5
    assert total(samples, "fusequeue_forward_rows_sum", model="demo") == 4 * 6 + 4, "one row per image and step"
    forwards = total(samples, "fusequeue_forward_rows_count")
    assert total(samples, "fusequeue_forward_seconds_count") == forwards
    assert total(samples, "fusequeue_queue_wait_seconds_count", priority="standard") == 4
    assert total(samples, "fusequeue_queue_wait_seconds_count", priority="bulk") == 1
    assert total(samples, "fusequeue_claims_total", attempt="first") == 5
    assert total(samples, "fusequeue_upload_seconds_count") == total(samples, "fusequeue_encode_seconds_count") == 5
    assert total(samples, "fusequeue_step_seconds_count", model="demo") == 5
    reasons = {dict(labels)["stopped_by"] for name, labels in samples if name == "fusequeue_batches_total"}
    assert reasons <= {"full", "cap", "memory", "overdue", "window", "solo"}
    log = worker.text()
    assert total(samples, "fusequeue_batches_total") == log.count('"event": "batch"') >= 2
    assert 0 < total(samples, "fusequeue_gpu_busy_seconds_total") < 60
    assert (total(samples, "fusequeue_spool_bytes"), total(samples, "fusequeue_worker_ready")) == (0, 1)

    assert total(api_samples, "fusequeue_submits_total", outcome="accepted") == 5
    assert total(api_samples, "fusequeue_workers", state="ready") == 1
    assert total(api_samples, "fusequeue_dead_letters") == 0
    lag = "fusequeue_event_lag_seconds_count"
    wait_until(lambda: total(scrape(stack.url), lag) >= 3 * 4, "each job was queued, ran and ended")
    wait_until(lambda: total(scrape(stack.url), "fusequeue_workers_wanted") == 0, "no worker is wanted")
    known = metrics.names()
    exported = {name for name, _ in samples.keys() | api_samples.keys() if name.startswith("fusequeue_")}
    assert {name for name in exported if not name.endswith("_created")} <= known
    for name in (first, *ids):
        assert name not in str(samples) + str(api_samples), "no series is specific to a job"
