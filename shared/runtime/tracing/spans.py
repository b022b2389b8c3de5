"""What spans are made of, without OpenTelemetry: spans that have ended, spans in progress, and what makes them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, TypeAlias

from shared.runtime.tracing.trace_context import TraceContext

Attributes: TypeAlias = Mapping[str, str | int | float | bool | Sequence[str] | None]
"""None: unknown, and left out. Never a prompt, a URL of a client or a key."""


class SpanKind(StrEnum):
    """Roles of spans, by OpenTelemetry's names."""

    INTERNAL = "INTERNAL"
    SERVER = "SERVER"
    CLIENT = "CLIENT"
    PRODUCER = "PRODUCER"
    CONSUMER = "CONSUMER"


@dataclass(frozen=True)
class EndedSpan:
    """A span with its times in ns since the epoch; `links` lead to other traces. `error` is why it failed."""

    name: str
    start_ns: int
    end_ns: int
    attributes: Attributes = field(default_factory=dict)
    kind: SpanKind = SpanKind.INTERNAL
    links: tuple[TraceContext, ...] = ()
    error: str | None = None
    children: tuple["EndedSpan", ...] = ()


@dataclass(frozen=True)
class SpanStart:
    """The beginning of a span: without a `parent`, of a trace; `start_ns` None is now.

    With `keep`, sampling does not apply: for a span that belongs to traces which are kept.
    """

    name: str
    kind: SpanKind = SpanKind.INTERNAL
    parent: TraceContext | None = None
    links: tuple[TraceContext, ...] = ()
    attributes: Attributes = field(default_factory=dict)
    start_ns: int | None = None
    keep: bool = False


class OpenSpan(Protocol):
    """A span in progress."""

    @property
    def context(self) -> TraceContext: ...

    def rename(self, name: str) -> None: ...

    def set(self, attributes: Attributes) -> None: ...

    def link(self, context: TraceContext) -> None: ...

    def fail(self, reason: str) -> None: ...

    def end(self, end_ns: int | None = None) -> None:
        """End it, now by default; it changes no more."""


class Tracer(Protocol):
    """Makes spans, and sends them in the background."""

    def start(self, span: SpanStart) -> OpenSpan: ...

    def record(self, span: EndedSpan, parent: TraceContext | None) -> None:
        """Add an ended span and its children to the trace of `parent`, or begin a trace with it."""

    def close(self) -> None:
        """Send what is left, for a bounded time."""
