"""Requests with traces on: the span of a request, and the job that it submits."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.http_server import BODY, serving
from harness.queue import claim
from harness.span_receiver import SpanReceiver
from harness.waiting import wait_until

from shared.job import Job, decode, encode
from shared.queue import Queue
from shared.runtime.tracing import TraceContext

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1"}


@pytest.fixture
async def api(traces: SpanReceiver, fake_queue: Queue, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(fake_queue, tmp_path) as client:
        yield client


async def trace_of(queue: Queue, job_id: str) -> TraceContext | None:
    record = await queue.jobs.get(job_id)
    assert record is not None
    return record.job.trace


async def test_a_request_continues_the_trace_of_its_client(
    api: httpx.AsyncClient, fake_queue: Queue, traces: SpanReceiver
) -> None:
    response = await api.post("/v1/jobs", json=BODY, headers={**PARENT, "x-request-id": "mine"})
    job_id = response.json()["id"]
    assert (response.status_code, response.headers["x-request-id"]) == (202, "mine")
    (span,) = traces.wait_for("POST /v1/jobs")
    assert (span.trace_id, span.parent_id, span.kind, span.error) == (TRACE, SPAN, "SERVER", None)
    assert span.attributes == {
        "fusequeue.job.id": job_id,
        "fusequeue.model": "demo",
        "fusequeue.request.id": "mine",
        "fusequeue.tenant": "default",
        "http.request.method": "POST",
        "http.response.status_code": 202,
        "http.route": "/v1/jobs",
    }
    expected = TraceContext(traceparent=f"00-{TRACE}-{span.span_id}-01", tracestate="vendor=1")
    assert await trace_of(fake_queue, job_id) == expected
    assert "trace" not in response.json()


@pytest.mark.parametrize("headers", [{}, {"traceparent": "00-zz"}])
async def test_a_request_without_a_valid_trace_begins_one(
    api: httpx.AsyncClient, fake_queue: Queue, traces: SpanReceiver, headers: dict[str, str]
) -> None:
    job_id = (await api.post("/v1/jobs", json=BODY, headers=headers)).json()["id"]
    (span,) = traces.wait_for("POST /v1/jobs")
    trace = await trace_of(fake_queue, job_id)
    assert trace is not None
    assert (trace.trace_id, trace.span_id, span.parent_id) == (span.trace_id, span.span_id, "")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/compat/replicate/v1/predictions", {"version": "demo", "input": {"prompt": "a red circle"}}),
        ("/compat/fal/fusequeue/demo", {"prompt": "a red circle"}),
        ("/page/jobs", BODY),
    ],
)
async def test_every_protocol_continues_the_trace(
    api: httpx.AsyncClient, fake_queue: Queue, traces: SpanReceiver, path: str, body: dict[str, Any]
) -> None:
    response = await api.post(path, json=body, headers=PARENT)
    assert response.is_success, response.text
    wait_until(lambda: traces.of_trace(TRACE), "the span is received")
    (span,) = traces.of_trace(TRACE)
    trace = await trace_of(fake_queue, str(span.attributes["fusequeue.job.id"]))
    assert trace is not None
    assert (trace.trace_id, trace.span_id) == (TRACE, span.span_id)


async def test_reads_have_no_spans(api: httpx.AsyncClient, traces: SpanReceiver) -> None:
    """Clients poll: most spans would be of polls."""
    job_id = (await api.post("/v1/jobs", json=BODY)).json()["id"]
    assert (await api.get(f"/v1/jobs/{job_id}", headers=PARENT)).status_code == 200
    assert (await api.post(f"/v1/jobs/{job_id}/cancel", headers=PARENT)).status_code == 200
    traces.wait_for("POST /v1/jobs/{job_id}/cancel")
    assert {span.name for span in traces.spans} == {"POST /v1/jobs", "POST /v1/jobs/{job_id}/cancel"}


async def test_refusals_are_no_errors_of_the_service(api: httpx.AsyncClient, traces: SpanReceiver) -> None:
    await api.post("/v1/jobs", json={**BODY, "steps": 100_000})
    await api.post("/none/of/the/routes", json=BODY)
    spans = {span.name: span for span in traces.wait_for("POST /v1/jobs", "unknown route")}
    assert spans["POST /v1/jobs"].attributes["http.response.status_code"] == 422
    assert {span.error for span in spans.values()} == {None}


async def test_each_line_of_a_bulk_request_has_a_trace_linked_to_it(
    api: httpx.AsyncClient, fake_queue: Queue, traces: SpanReceiver
) -> None:
    lines = b"\n".join(json.dumps({**BODY, "seed": seed}).encode() for seed in range(3))
    headers = {"Content-Type": "application/x-ndjson", **PARENT}
    results = (await api.post("/v1/jobs:bulk", content=lines, headers=headers)).text.splitlines()
    (request,) = traces.wait_for("POST /v1/jobs:bulk", trace_id=TRACE)
    found = [await trace_of(fake_queue, json.loads(result)["id"]) for result in results]
    ids = {trace.trace_id for trace in found if trace is not None}
    assert len(ids) == 3
    for trace_id in ids:
        (submit,) = traces.wait_for("submit", trace_id=trace_id)
        assert submit.links == ((TRACE, request.span_id),)


async def test_a_retry_is_in_the_trace_of_its_own_request(
    api: httpx.AsyncClient, fake_queue: Queue, traces: SpanReceiver
) -> None:
    job_id = (await api.post("/v1/jobs", json=BODY)).json()["id"]
    await api.post(f"/v1/jobs/{job_id}/cancel")
    again = await api.post(f"/v1/jobs/{job_id}/retry", headers=PARENT)
    assert again.status_code == 202, again.text
    trace = await trace_of(fake_queue, again.json()["id"])
    assert trace is not None
    assert trace.trace_id == TRACE


async def test_a_worker_is_handed_the_trace(api: httpx.AsyncClient, fake_queue: Queue) -> None:
    """Whether it traces or not."""
    await api.post("/v1/jobs", json={**BODY, "priority": "interactive"}, headers=PARENT)
    claims = await claim(fake_queue)
    while not claims:
        claims = await claim(fake_queue)
    trace = claims[0].job.trace
    assert trace is not None
    assert trace.trace_id == TRACE


async def test_a_trace_is_ignored_while_traces_are_off(fake_queue: Queue, tmp_path: Path) -> None:
    async with serving(fake_queue, tmp_path) as api:
        response = await api.post("/v1/jobs", json=BODY, headers=PARENT)
    assert await trace_of(fake_queue, response.json()["id"]) is None


def test_jobs_without_a_trace_have_the_wire_form_of_older_versions(make_job: Callable[..., Job]) -> None:
    assert "trace" not in json.loads(encode(make_job()))
    traced = make_job(trace=TraceContext(traceparent=PARENT["traceparent"]))
    assert decode(encode(traced)) == traced
