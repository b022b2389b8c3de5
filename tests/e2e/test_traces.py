"""One trace over real processes, read back from an OTLP receiver: request, queue, claim, forwards, upload, webhook."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from harness.span_receiver import ReceivedSpan, SpanReceiver, receiving_spans
from harness.waiting import wait_until
from harness.webhook_receiver import WebhookReceiver, receiving

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
JOB_SPANS = ("job", "queue", "claim", "slots", "forwards", "decode", "upload", "encode", "settle")
PROMPT = "a red circle on a blue ground"


@pytest.fixture
def spans() -> Iterator[SpanReceiver]:
    with receiving_spans() as receiver:
        yield receiver


@pytest.fixture
def hooks() -> Iterator[WebhookReceiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture
def stack(make_stack: Callable[..., Any], spans: SpanReceiver, hooks: WebhookReceiver) -> Any:
    """A service with chores that sends its traces to `spans`."""
    webhooks = {"webhook_allow_networks": "127.0.0.0/8", "webhook_allow_http": "1", "webhook_ports": str(hooks.port)}
    stack = make_stack(traces="1", **webhooks)
    times = {"OTEL_BSP_SCHEDULE_DELAY": "200", "OTEL_EXPORTER_OTLP_TIMEOUT": "5"}
    stack.env |= {"OTEL_EXPORTER_OTLP_ENDPOINT": spans.url, **times}
    stack.start()
    stack.chores()
    return stack


def submit(stack: Any, hooks: WebhookReceiver, **body: object) -> str:
    """Submit a job as the span `CALLER` of the trace `TRACE`."""
    response = stack.client.post(
        "/v1/jobs",
        json={"model": "demo", "prompt": PROMPT, "webhook": hooks.url, **body},
        headers={"traceparent": f"00-{TRACE}-{CALLER}-01", "tracestate": "caller=1"},
    )
    assert response.status_code == 202, response.text
    return str(response.json()["id"])


def parents(spans: list[ReceivedSpan]) -> dict[str, str]:
    """Return the name of each span's parent; `caller` for that of the client."""
    names = {span.span_id: span.name for span in spans} | {CALLER: "caller"}
    return {span.name: names[span.parent_id] for span in spans}


def test_one_trace_leads_from_the_request_to_the_webhook(
    stack: Any, spans: SpanReceiver, hooks: WebhookReceiver
) -> None:
    """Without a receiver, jobs run too."""
    check_trace(stack, spans, hooks)
    hooks.received.clear()
    check_without_receiver(stack, spans, hooks)


def check_trace(stack: Any, spans: SpanReceiver, hooks: WebhookReceiver) -> None:
    job_id = submit(stack, hooks, steps=6)
    assert stack.finish(job_id)["status"] == "succeeded"
    found = spans.wait_for("POST /v1/jobs", *JOB_SPANS, "webhook", trace_id=TRACE)

    assert parents(found) == {
        "POST /v1/jobs": "caller",
        "job": "POST /v1/jobs",
        **dict.fromkeys(("queue", "claim", "slots", "upload", "settle"), "job"),
        **dict.fromkeys(("forwards", "decode"), "slots"),
        "encode": "upload",
        "webhook": "POST /v1/jobs",
    }
    by_name = {span.name: span for span in found}
    services = {span.name: span.service for span in found}
    assert (services.pop("POST /v1/jobs"), services.pop("webhook")) == ("fusequeue-api", "fusequeue-chores")
    assert set(services.values()) == {"fusequeue-worker"}
    assert by_name["job"].attributes["fusequeue.job.id"] == by_name["webhook"].attributes["fusequeue.job.id"] == job_id
    assert by_name["job"].attributes["fusequeue.state"] == "succeeded"
    assert by_name["forwards"].attributes["fusequeue.forwards"] == 6
    assert by_name["webhook"].attributes["http.response.status_code"] == 204
    in_order = ("queue", "claim", "slots", "upload", "settle")
    starts = [by_name[name].start_ns for name in in_order]
    assert starts == sorted(starts)
    assert all(span.start_ns <= span.end_ns and span.error is None for span in found)

    (batch,) = [span for span in spans.wait_for("batch") if span.name == "batch"]
    assert by_name["forwards"].links == ((batch.trace_id, batch.span_id),)
    assert batch.links == ((TRACE, by_name["POST /v1/jobs"].span_id),)
    assert (batch.attributes["fusequeue.batch.jobs"], batch.attributes["fusequeue.forwards"]) == (1, 6)

    ((headers, _),) = hooks.wait_for(["job.succeeded"])
    assert headers["traceparent"] == f"00-{TRACE}-{by_name['webhook'].span_id}-01"
    assert headers["tracestate"] == "caller=1"
    assert PROMPT not in repr(spans.spans)


def check_without_receiver(stack: Any, spans: SpanReceiver, hooks: WebhookReceiver) -> None:
    """The spans of a worker without a receiver are dropped, and its log says so once."""
    spans.server.shutdown()
    spans.server.server_close()
    (worker,) = [process for process in stack.processes if process.name == "worker0"]
    assert stack.finish(submit(stack, hooks, steps=2))["status"] == "succeeded"
    ((headers, _),) = hooks.wait_for(["job.succeeded"])
    assert headers["traceparent"].startswith(f"00-{TRACE}-")
    wait_until(lambda: "traces_not_sent" in worker.text(), "the worker's spans are dropped")
    assert stack.finish(submit(stack, hooks, steps=3))["status"] == "succeeded"
    assert worker.stop() == 0
    assert worker.text().count('"event": "traces_not_sent"') == 1
