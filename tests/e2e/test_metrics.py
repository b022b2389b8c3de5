"""What a worker and an API at work tell, read as Prometheus reads it; and when a worker says that it is ready."""

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
    answer = httpx.get(f"{url}/metrics", timeout=60)
    assert answer.status_code == 200
    families = text_string_to_metric_families(answer.text)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def total(samples: Samples, name: str, **labels: str) -> float:
    """Return the sum over all series of that name that bear these labels."""
    return sum(
        value for (one, theirs), value in samples.items() if one == name and labels.items() <= dict(theirs).items()
    )


def readiness(url: str) -> int:
    try:
        return httpx.get(f"{url}/readyz", timeout=60).status_code
    except httpx.TransportError:
        return 0


@pytest.mark.timeout(600)
def test_a_worker_tells_what_it_does_and_when_it_is_ready(make_stack: Callable[..., Any]) -> None:
    """Jobs of two sizes: every number follows from what was asked for. Without Redis, and while it drains, it is not
    ready, and answers all the same.
    """
    port = free_port()
    whole, worker = make_stack(worker_port=str(port)), f"http://127.0.0.1:{port}"
    whole.redis.start()
    whole.api.start()
    wait_until(whole.ready, "the API is ready")
    at_work = whole.worker()
    wait_until(lambda: readiness(worker) == 200, "the worker is warm", 180)

    tells_what_was_done(whole, worker, at_work)

    whole.redis.send(signal.SIGSTOP)
    wait_until(lambda: readiness(worker) == 503, "a silent Redis is noticed")
    assert httpx.get(f"{worker}/healthz", timeout=60).status_code == 200
    whole.redis.send(signal.SIGCONT)
    wait_until(lambda: readiness(worker) == 200, "it is back")
    wait_until(whole.ready, "so is the API")
    job = whole.submit(prompt="a red circle", steps=100)
    wait_until(lambda: whole.job(job)["status"] != "queued", "the job runs")
    at_work.send(signal.SIGTERM)
    wait_until(lambda: readiness(worker) in (503, 0), "the drain is told")
    assert at_work.process.wait(90) == 0


def tells_what_was_done(whole: Any, worker: str, at_work: Any) -> None:
    ids = [whole.submit(prompt="a red circle", steps=6, seed=at) for at in range(4)]
    ids += [whole.submit(prompt="a red circle", steps=4, seed=9, width=96, priority="bulk")]
    assert {whole.finish(name, 180)["status"] for name in ids} == {"succeeded"}
    told, of_api = scrape(worker), scrape(whole.url)

    assert total(told, "fusequeue_jobs_ended_total", model="demo", state="succeeded") == 5
    assert total(told, "fusequeue_forward_rows_sum", model="demo") == 4 * 6 + 4, "a row a picture and step"
    forwards = total(told, "fusequeue_forward_rows_count")
    assert total(told, "fusequeue_forward_seconds_count") == forwards
    assert total(told, "fusequeue_queue_wait_seconds_count", priority="standard") == 4
    assert total(told, "fusequeue_queue_wait_seconds_count", priority="bulk") == 1
    assert total(told, "fusequeue_claims_total", attempt="first") == 5
    assert total(told, "fusequeue_upload_seconds_count") == total(told, "fusequeue_encode_seconds_count") == 5
    assert total(told, "fusequeue_step_seconds_count", model="demo") == 5
    reasons = {dict(labels)["stopped_by"] for name, labels in told if name == "fusequeue_batches_total"}
    assert reasons <= {"full", "cap", "memory", "overdue", "window", "solo"}
    log = at_work.text()
    assert total(told, "fusequeue_batches_total") == log.count('"event": "batch"') >= 2
    assert 0 < total(told, "fusequeue_gpu_busy_seconds_total") < 60
    assert (total(told, "fusequeue_spool_bytes"), total(told, "fusequeue_worker_ready")) == (0, 1)

    assert total(of_api, "fusequeue_submits_total", outcome="accepted") == 5
    assert total(of_api, "fusequeue_workers", state="ready") == 1
    assert total(of_api, "fusequeue_dead_letters") == 0
    lag = "fusequeue_event_lag_seconds_count"
    wait_until(lambda: total(scrape(whole.url), lag) >= 3 * 5, "each job was queued, ran and ended")
    wait_until(lambda: total(scrape(whole.url), "fusequeue_workers_wanted") == 0, "no worker is wanted any more")
    known = metrics.names()
    shown = {name for name, _ in told.keys() | of_api.keys() if name.startswith("fusequeue_")}
    assert {name for name in shown if not name.endswith("_created")} <= known
    for name in ids:
        assert name not in str(told) + str(of_api), "no series is a job's own"
