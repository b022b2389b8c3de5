"""Spans on their way to a receiver: what arrives, and that no receiver is needed for anything else."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from harness.http_server import ROOT
from harness.ports import free_port
from harness.span_receiver import SpanReceiver
from harness.waiting import wait_until

from shared.errors import ConfigurationError
from shared.job import Job
from shared.runtime import metrics, tracing
from shared.runtime.tracing import EndedSpan, SpanKind, SpanStart, TraceContext
from worker.metrics.batch_trace import MAX_LINKS, BatchTotals, BatchTrace

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = TraceContext(traceparent=f"00-{TRACE}-{SPAN}-01", tracestate="vendor=1")
UNSAMPLED = TraceContext(traceparent=f"00-{TRACE}-{SPAN}-00")

PARTS = """
import json, sys
from shared.runtime import tracing
import api.app, api.submission, api.chores.webhooks, api.protocols.openai.batches.batch_runner, worker.__main__
tracing.configure(False, "off")
with tracing.spanning(tracing.SpanStart("request")) as span, tracing.new_trace("submit"):
    assert span is None and tracing.current() is None
tracing.record(tracing.EndedSpan("job", 0, 1), None)
ours = ("opentelemetry.sdk.trace", "opentelemetry.exporter", "shared.runtime.tracing.otel")
print(json.dumps([name for name in sys.modules if name.startswith(ours)]))
"""


def ended(name: str, *children: EndedSpan, **more: object) -> EndedSpan:
    return EndedSpan(name, 1_000, 2_000, children=children, **more)  # type: ignore[arg-type]


def count(outcome: str) -> float:
    value = metrics.REGISTRY.get_sample_value("fusequeue_trace_spans_total", {"outcome": outcome})
    return value or 0.0


def test_nothing_of_opentelemetry_is_imported_while_traces_are_off() -> None:
    """Except what Redis' client imports for its metrics, where it finds it."""
    done = subprocess.run([sys.executable, "-c", PARTS], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_ended_spans_arrive_in_the_trace_of_their_parent(traces: SpanReceiver) -> None:
    child = ended("forwards", links=(UNSAMPLED,), attributes={"rows": ["1 x 2"], "unknown": None})
    tracing.record(ended("job", child, kind=SpanKind.CONSUMER, error="out_of_memory"), SAMPLED)
    spans = {span.name: span for span in traces.wait_for("job", "forwards", trace_id=TRACE)}
    job, forwards = spans["job"], spans["forwards"]
    assert (job.parent_id, job.kind, job.error, job.service) == (SPAN, "CONSUMER", "out_of_memory", "fusequeue-test")
    assert (job.start_ns, job.end_ns) == (1_000, 2_000)
    assert forwards.parent_id == job.span_id
    assert (forwards.attributes, forwards.links) == ({"rows": ["1 x 2"]}, ((TRACE, SPAN),))


def test_headers_of_clients_fill_no_log(traces: SpanReceiver, caplog: pytest.LogCaptureFixture) -> None:
    tracing.accepted([f"00-{TRACE}-{SPAN}-01" + 600 * "x"], [])
    tracing.accepted([f"00-{TRACE}-{SPAN}-01"], ["a=" + 9000 * "x"])
    assert [record.name for record in caplog.records if record.name.startswith("opentelemetry")] == []


def test_the_spans_of_an_unsampled_trace_are_not_sent(traces: SpanReceiver) -> None:
    tracing.record(ended("left out", ended("its child")), UNSAMPLED)
    tracing.record(ended("sent"), SAMPLED)
    assert [span.name for span in traces.wait_for("sent")] == ["sent"]


def test_a_span_around_code_is_handed_on_with_the_state_of_its_parent(traces: SpanReceiver) -> None:
    with tracing.spanning(SpanStart("request", SpanKind.SERVER, SAMPLED)) as span:
        assert span is not None
        context = tracing.current()
    assert context is not None
    assert (context.trace_id, context.headers["tracestate"]) == (TRACE, "vendor=1")
    (request,) = traces.wait_for("request")
    assert (request.span_id, request.parent_id) == (context.span_id, SPAN)
    assert tracing.current() is None


def test_an_exception_fails_its_span_without_its_text(traces: SpanReceiver) -> None:
    with pytest.raises(ValueError), tracing.spanning(SpanStart("request")):
        raise ValueError("a prompt")
    (request,) = traces.wait_for("request")
    assert request.error == "ValueError"
    assert "a prompt" not in str(request)


def test_each_job_of_a_request_of_many_has_a_trace_linked_to_it(traces: SpanReceiver) -> None:
    with tracing.spanning(SpanStart("request", parent=SAMPLED)) as request:
        assert request is not None
        contexts = []
        for _ in range(2):
            with tracing.new_trace("submit"):
                contexts.append(tracing.current())
    found = [one.trace_id for one in contexts if one is not None]
    assert len({TRACE, *found}) == 3
    for trace_id in found:
        (submit,) = traces.wait_for("submit", trace_id=trace_id)
        assert submit.links == ((TRACE, request.context.span_id),)


def test_jobs_of_an_unsampled_request_begin_no_traces(traces: SpanReceiver) -> None:
    with tracing.spanning(SpanStart("request", parent=UNSAMPLED)), tracing.new_trace("submit"):
        context = tracing.current()
    assert context is not None
    assert (context.trace_id, context.sampled) == (TRACE, False)


def test_the_sampler_of_the_environment_decides(receiver: SpanReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    tracing.configure(True, "test")
    tracing.record(ended("begins a trace"), None)
    tracing.record(ended("follows its parent"), SAMPLED)
    tracing.close()
    assert [span.name for span in receiver.spans] == ["follows its parent"]


def test_a_batch_is_linked_to_its_jobs_in_spans_of_bounded_size(traces: SpanReceiver, make_job: type[Job]) -> None:
    """It is kept because their traces are, and begins another span after so many jobs."""
    totals = BatchTotals()
    batch = BatchTrace(make_job(), "demo:64x64x1:0", totals)
    assert batch.add(UNSAMPLED) is None
    assert batch.add(None) is None
    totals.jobs += 2
    in_spans = []
    for number in range(MAX_LINKS + 3):
        trace = TraceContext(traceparent=f"00-{number + 1:032x}-{SPAN}-01")
        in_spans.append(batch.add(trace))
        totals.jobs, totals.forwards, totals.rows = totals.jobs + 1, totals.forwards + 2, totals.rows + 6
    batch.end("window")
    wait_until(lambda: len(traces.spans) == 2, "both spans are received")
    first, second = sorted(traces.spans, key=lambda span: span.start_ns)
    assert [len(first.links), len(second.links)] == [MAX_LINKS, 3]
    assert second.links[0] == (f"{MAX_LINKS + 1:032x}", SPAN)
    assert (first.attributes["fusequeue.batch.jobs"], first.attributes["fusequeue.forwards"]) == (64, 128)
    assert (second.attributes["fusequeue.batch.jobs"], second.attributes["fusequeue.rows.mean"]) == (3, 3.0)
    assert (first.attributes.get("fusequeue.batch.stopped_by"), second.attributes["fusequeue.batch.stopped_by"]) == (
        None,
        "window",
    )
    assert [one.span_id for one in in_spans if one is not None] == [first.span_id] * MAX_LINKS + [second.span_id] * 3


@pytest.mark.parametrize("status", [400, 503])
def test_spans_that_a_receiver_refuses_are_counted_and_dropped(
    receiver: SpanReceiver, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    receiver.status, before = status, count("failed")
    tracing.configure(True, "test")
    tracing.record(ended("refused"), None)
    wait_until(lambda: count("failed") == before + 1, "the span is counted as failed")
    receiver.status = 200
    tracing.record(ended("sent"), None)
    assert [span.name for span in receiver.wait_for("sent")] == ["sent"]
    tracing.close()


def test_the_queue_of_spans_is_bounded(receiver: SpanReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    before = count("ended")
    tracing.configure(True, "test")
    for _ in range(1_000):
        tracing.record(ended("job"), None)
    assert count("ended") == before + 1_000
    tracing.close()
    assert count("failed") - before < 100


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "-1"),
    ],
)
def test_an_invalid_variable_is_an_error_at_the_start(
    receiver: SpanReceiver, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match="OTEL_"):
        tracing.configure(True, "test")
    assert not tracing.enabled()


def test_the_sdk_can_be_disabled_for_all_programs_of_an_environment(
    receiver: SpanReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    tracing.configure(True, "test")
    assert not tracing.enabled()


def test_traces_without_opentelemetry_are_an_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shared.runtime.tracing.otel", None)
    monkeypatch.delattr(tracing, "otel", raising=False)
    with pytest.raises(ConfigurationError, match=r"fusequeue-server\[traces\]"):
        tracing.configure(True, "test")
