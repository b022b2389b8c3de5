"""The spans of a batch, linked to the jobs in it."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shared.job import Job
from shared.runtime import tracing
from shared.runtime.tracing import SpanStart, TraceContext

if TYPE_CHECKING:
    from shared.runtime.tracing.otel import OpenSpan

MAX_LINKS = 64
"""Of one span. Under load a batch lasts for hours: after this many jobs its next span begins."""


@dataclass
class BatchTotals:
    """Counts of a batch so far; `rows` are those of all `forwards`."""

    jobs: int = 0
    forwards: int = 0
    rows: int = 0
    forward_s: float = 0.0


class BatchTrace:
    """The spans of one batch, which is in no trace of a job: it has jobs of many traces."""

    def __init__(self, first_job: Job, signature: str, totals: BatchTotals) -> None:
        self._attributes = {"fusequeue.model": first_job.model, "fusequeue.signature": signature}
        self._totals = totals
        self._before = BatchTotals()
        self._span: OpenSpan | None = None
        self._links = 0

    def add(self, trace: TraceContext | None) -> TraceContext | None:
        """Link the batch to the trace of a job that enters it, and return the batch's span; None without one."""
        if trace is None or not trace.sampled:
            return None
        if self._links >= MAX_LINKS:
            self.end()
        if self._span is None:
            self._before = replace(self._totals)
            self._span = tracing.start(SpanStart("batch", links=(trace,), attributes=self._attributes, keep=True))
        else:
            self._span.link(trace)
        self._links += 1
        return None if self._span is None else self._span.context

    def end(self, stopped_by: str | None = None) -> None:
        """End the span, with the counts since its start."""
        if self._span is not None:
            now, before = self._totals, self._before
            forwards = now.forwards - before.forwards
            self._span.set(
                {
                    "fusequeue.batch.jobs": now.jobs - before.jobs,
                    "fusequeue.forwards": forwards,
                    "fusequeue.rows.mean": round((now.rows - before.rows) / forwards, 2) if forwards else None,
                    "fusequeue.forward_seconds": round(now.forward_s - before.forward_s, 4),
                    "fusequeue.batch.stopped_by": stopped_by,
                }
            )
            self._span.end()
        self._span, self._links = None, 0
