"""OpenTelemetry's SDK with OTLP over HTTP: the one module that imports it, where traces are on.

The standard variables configure it: OTEL_EXPORTER_OTLP_* (receiver), OTEL_TRACES_SAMPLER, OTEL_RESOURCE_ATTRIBUTES,
OTEL_BSP_* (queue and batches of spans).
"""

import logging
import os
import threading
from collections.abc import Iterable, Sequence

import structlog
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, NonRecordingSpan, Span, SpanContext, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from shared.errors import ConfigurationError
from shared.runtime import metrics
from shared.runtime.clock import VERSION
from shared.runtime.tracing.spans import Attributes, EndedSpan, SpanStart
from shared.runtime.tracing.trace_context import MAX_STATE_CHARS, TraceContext

log = structlog.get_logger()

CLOSE_S = 5.0
"""How long a process that stops sends its last spans."""

PROTOCOL = "http/protobuf"
_SCOPE = InstrumentationScope("fusequeue", VERSION)
_OK = Status(StatusCode.UNSET)
_W3C = TraceContextTextMapPropagator()
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


class OtelTracer:
    """Makes spans with the SDK; a thread sends them in batches from a bounded queue."""

    def __init__(self, service: str) -> None:
        for name in _PROTOCOLS:
            if os.environ.get(name, PROTOCOL) != PROTOCOL:
                raise ConfigurationError(f"{name}: {os.environ[name]}; only {PROTOCOL} is supported, unset it")
        # It logs each failed request; `_Receiver` logs when they begin to fail, and when they succeed again.
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
        # It logs each invalid `traceparent` and `tracestate` of a client.
        logging.getLogger("opentelemetry.trace").setLevel(logging.CRITICAL)
        try:
            self._processor = _CountedSpans(_Receiver(OTLPSpanExporter()))
            named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": service}
            self._resource = resource = Resource.create({**named, "service.version": VERSION})
            # Not at exit: a receiver that does not respond would hold the exit up.
            provider = TracerProvider(resource=resource, shutdown_on_exit=False)
            keeping = TracerProvider(sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False)
        except Exception as error:
            raise ConfigurationError(f"traces: {error}; correct the OTEL_ variables") from error
        for each in (provider, keeping):
            each.add_span_processor(self._processor)
        self._tracer = provider.get_tracer(_SCOPE.name, _SCOPE.version)
        self._keeping = keeping.get_tracer(_SCOPE.name, _SCOPE.version)
        self._ids = RandomIdGenerator()

    def accepted(self, traceparent: Sequence[str], tracestate: Sequence[str]) -> TraceContext | None:
        return accepted(traceparent, tracestate)

    def start(self, span: SpanStart) -> "OpenSpan":
        tracer = self._keeping if span.keep else self._tracer
        return OpenSpan(
            tracer.start_span(
                span.name,
                _around(span.parent),
                trace.SpanKind[span.kind],
                _known(span.attributes),
                _links(span.links),
                span.start_ns,
            )
        )

    def record(self, span: EndedSpan, parent: TraceContext | None) -> None:
        """Add an ended span and its children to the trace of `parent`, or begin a trace with it."""
        kind, attributes, links = trace.SpanKind[span.kind], _known(span.attributes), _links(span.links)
        made = self._tracer.start_span(span.name, _around(parent), kind, attributes, links, span.start_ns)
        if not made.is_recording():  # then no child is
            return
        for child in span.children:
            self._record_child(child, made.get_span_context())
        if span.error is not None:
            made.set_status(Status(StatusCode.ERROR, span.error))
        made.end(span.end_ns)

    def _record_child(self, span: EndedSpan, parent: SpanContext) -> None:
        """Add a span that is known as a whole: one that the SDK starts, changes and ends takes four times as long."""
        span_id = self._ids.generate_span_id()
        own = SpanContext(parent.trace_id, span_id, False, parent.trace_flags, parent.trace_state)
        for child in span.children:
            self._record_child(child, own)
        self._processor.on_end(
            ReadableSpan(
                span.name,
                own,
                parent,
                self._resource,
                _known(span.attributes),
                links=_links(span.links),
                kind=trace.SpanKind[span.kind],
                status=_OK if span.error is None else Status(StatusCode.ERROR, span.error),
                start_time=span.start_ns,
                end_time=span.end_ns,
                instrumentation_scope=_SCOPE,
            )
        )

    def close(self) -> None:
        """Send what is left, for `CLOSE_S` at most."""
        closing = threading.Thread(target=self._processor.shutdown, name="traces-close", daemon=True)
        closing.start()
        closing.join(CLOSE_S)


class OpenSpan:
    """A span in progress."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self.context = _context(span.get_span_context())

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(_known(attributes))

    def link(self, context: TraceContext) -> None:
        self._span.add_link(_span_context(context))

    def fail(self, reason: str) -> None:
        self._span.set_status(Status(StatusCode.ERROR, reason))

    def end(self, end_ns: int | None = None) -> None:
        self._span.end(end_ns)


class _CountedSpans(BatchSpanProcessor):
    """Counts the spans that end. Beyond its queue (OTEL_BSP_MAX_QUEUE_SIZE, 2,048) it drops the oldest."""

    def on_end(self, span: ReadableSpan) -> None:
        metrics.trace_spans.labels("ended").inc()
        super().on_end(span)


class _Receiver(SpanExporter):
    """Sends batches of spans to the receiver; logs when that begins to fail, and when it succeeds again."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        failed = result is not SpanExportResult.SUCCESS
        metrics.trace_spans.labels("failed" if failed else "sent").inc(len(spans))
        if failed and not self._failing:
            log.warning("traces_not_sent", spans=len(spans), remedy="check OTEL_EXPORTER_OTLP_ENDPOINT; jobs go on")
        elif self._failing and not failed:
            log.info("traces_sent_again")
        self._failing = failed
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


def _known(attributes: Attributes) -> dict[str, AttributeValue]:
    return {name: value for name, value in attributes.items() if value is not None}


def _links(contexts: Iterable[TraceContext]) -> list[Link]:
    return [Link(_span_context(context)) for context in contexts]


def accepted(traceparent: Sequence[str], tracestate: Sequence[str] = ()) -> TraceContext | None:
    """Return the context in the values of a request's headers; None without a valid `traceparent`.

    A `tracestate` that is invalid or too long is left out.
    """
    if len(traceparent) != 1:
        return None
    found = _W3C.extract({"traceparent": traceparent, "tracestate": tracestate}, Context())
    span = trace.get_current_span(found).get_span_context()
    return _context(span) if span.is_valid else None


def _around(parent: TraceContext | None) -> Context:
    """Return the SDK's context for a child of `parent`, or for the first span of a trace."""
    return Context() if parent is None else _W3C.extract(parent.headers, Context())


def _span_context(context: TraceContext) -> SpanContext:
    return trace.get_current_span(_around(context)).get_span_context()


def _context(span: SpanContext) -> TraceContext:
    headers: dict[str, str] = {}
    _W3C.inject(headers, trace.set_span_in_context(NonRecordingSpan(span), Context()))
    if len(headers.get("tracestate", "")) > MAX_STATE_CHARS:
        del headers["tracestate"]
    return TraceContext(**headers)
