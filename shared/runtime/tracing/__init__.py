"""Traces with OpenTelemetry, off by default: then nothing of it is imported, and each call here returns at once.

Only `otel.py` imports OpenTelemetry, which is in the extra `traces`. Spans are sent in the background; neither a slow
receiver nor an error in here changes what the service does.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

import structlog

from shared.errors import ConfigurationError
from shared.runtime.tracing.spans import Attributes, EndedSpan, SpanKind, SpanStart
from shared.runtime.tracing.trace_context import TraceContext

if TYPE_CHECKING:
    from shared.runtime.tracing.otel import OpenSpan, OtelTracer

__all__ = [
    "Attributes",
    "EndedSpan",
    "SpanKind",
    "SpanStart",
    "TraceContext",
    "accepted",
    "close",
    "configure",
    "current",
    "enabled",
    "new_trace",
    "record",
    "require",
    "set_attributes",
    "spanning",
    "start",
]

log = structlog.get_logger()

_tracer: "OtelTracer | None" = None
_current: ContextVar["OpenSpan | None"] = ContextVar("current_span", default=None)


def require(traces: bool) -> None:
    """Import OpenTelemetry if traces are on; raises `ConfigurationError` where it is not installed."""
    if not traces:
        return
    try:
        from shared.runtime.tracing import otel  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(
            f"FUSEQUEUE_TRACES needs OpenTelemetry ({error}); install fusequeue-server[traces], or unset it"
        ) from error


def configure(traces: bool, service: str) -> None:
    """Begin to trace if `traces`; `service` names this process unless OTEL_SERVICE_NAME does.

    Raises `ConfigurationError` for a missing OpenTelemetry or an invalid OTEL_ variable.
    """
    global _tracer
    require(traces)
    if traces and os.environ.get("OTEL_SDK_DISABLED", "").lower() != "true":
        from shared.runtime.tracing.otel import OtelTracer

        _tracer = OtelTracer(service)


def close() -> None:
    """Send the spans that are left, and trace no more."""
    global _tracer
    tracer, _tracer = _tracer, None
    if tracer is not None:
        tracer.close()


def enabled() -> bool:
    return _tracer is not None


def accepted(traceparent: Sequence[str], tracestate: Sequence[str]) -> TraceContext | None:
    """Return the context in the values of a request's headers; None without a valid one, and while traces are off."""
    return None if _tracer is None else _tracer.accepted(traceparent, tracestate)


def current() -> TraceContext | None:
    """Return the span around this code, None without one."""
    span = _current.get()
    return None if span is None else span.context


def set_attributes(attributes: Attributes) -> None:
    """Add attributes to the span around this code."""
    if (span := _current.get()) is not None:
        span.set(attributes)


def start(span: SpanStart) -> "OpenSpan | None":
    """Start a span, which its caller ends; None while traces are off."""
    if _tracer is None:
        return None
    try:
        return _tracer.start(span)
    except Exception:
        log.exception("span_failed", name=span.name)
        return None


@contextmanager
def spanning(span: SpanStart) -> "Iterator[OpenSpan | None]":
    """Run the block in a span, which an exception fails; None while traces are off."""
    opened = start(span)
    if opened is None:
        yield None
        return
    token = _current.set(opened)
    try:
        yield opened
    except BaseException as error:
        opened.fail(type(error).__name__)
        raise
    finally:
        _current.reset(token)
        opened.end()


@contextmanager
def new_trace(name: str) -> Iterator[None]:
    """Run the block in a trace of its own, linked to the span around it: a request of many jobs has one for each.

    A trace of a hundred thousand jobs could not be read, and receivers refuse it.
    """
    around = current()
    if _tracer is None or (around is not None and not around.sampled):
        yield
        return
    links = () if around is None else (around,)
    with spanning(SpanStart(name, SpanKind.PRODUCER, links=links)):
        yield


def record(span: EndedSpan, parent: TraceContext | None) -> None:
    """Add a span that has ended, with its children, to the trace of `parent`; without one it begins a trace."""
    if _tracer is None:
        return
    try:
        _tracer.record(span, parent)
    except Exception:
        log.exception("span_failed", name=span.name)
