"""What spans are made of, without OpenTelemetry."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

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
