"""One log event and metrics per batch: its size, and what limited it."""

import time
from dataclasses import dataclass, field

import structlog

from shared.config.catalog import Catalog
from shared.job import Job
from shared.runtime import metrics
from shared.signature import mismatched_fields
from worker.claims.claimed_job import ClaimedJob
from worker.engine.protocol import ForwardDone
from worker.metrics.batch_trace import BatchTotals, BatchTrace

log = structlog.get_logger()


@dataclass
class BatchLimits:
    """What bounds a batch, in images: `peak_slots` is the most it held at once, `max_batch` the models file's limit,
    `rule_rows` a batch rule's, `memory_rows` what memory holds, `efficient_rows` where one more is not efficient.
    """

    max_batch: int
    rule_rows: int
    memory_rows: int
    efficient_rows: int
    peak_slots: int = 0
    must_run_solo: bool = False
    overdue: bool = False
    queued_ms: int = 0
    window_ms: int = 0

    def stopped_by(self) -> str:
        """Return why the batch held no more.

        `memory`: below the rule's limit. `cap`: one more is not efficient, or a rule forbids it. `full`: `max_batch`.
        `overdue`: another signature waited too long. `window`: the first job waited its whole window for batch mates.
        `solo`: a lost job, or no batch mates were expected.
        """
        if self.must_run_solo:
            return "solo"
        if self.peak_slots >= self.memory_rows < self.rule_rows:
            return "memory"
        if self.peak_slots >= min(self.efficient_rows, self.rule_rows) < self.max_batch:
            return "cap"
        if self.peak_slots >= self.max_batch:
            return "full"
        if self.overdue:
            return "overdue"
        return "window" if self.queued_ms >= self.window_ms else "solo"


@dataclass
class _Batch:
    """Jobs of one signature, from the first claim until the last job leaves the engine."""

    signature: str
    first_job: Job
    limits: BatchLimits
    started_s: float
    totals: BatchTotals
    trace: BatchTrace
    ended_s: float | None = None
    max_wait_ms: int = 0
    max_rows: int = 0
    mismatched_fields: tuple[str, ...] = ()
    slots: dict[str, int] = field(default_factory=dict)  # by the key of each job in the engine

    def had_room_for(self, claimed: ClaimedJob) -> bool:
        """Return whether a job of another signature waited while this batch ran with enough free slots."""
        claim, limits = claimed.claim, self.limits
        waited = self.ended_s is None or claimed.queued_since_s < self.ended_s
        free_slots = min(limits.rule_rows, limits.memory_rows, limits.efficient_rows) - limits.peak_slots
        return (
            waited and self.signature != claim.signature and not limits.must_run_solo and claim.job.slots <= free_slots
        )


class BatchLog:
    """Records the batches of one worker. Used on the event loop only."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._running: dict[str, _Batch] = {}  # by signature
        self._latest: _Batch | None = None

    def admit(self, claimed: ClaimedJob) -> None:
        """Add a claimed job; the first of its signature starts a batch."""
        claim = claimed.claim
        batch = self._running.get(claim.signature) or self._start(claimed)
        claimed.times.batch = batch.trace.add(claim.job.trace)
        batch.totals.jobs += 1
        batch.slots[claimed.claim_key] = claim.job.slots
        batch.limits.peak_slots = max(batch.limits.peak_slots, sum(batch.slots.values()))
        batch.max_wait_ms = max(batch.max_wait_ms, claim.queued_ms)

    def set_limits(self, signature: str, memory_rows: int, efficient_rows: int) -> None:
        if batch := self._running.get(signature):
            batch.limits.memory_rows, batch.limits.efficient_rows = memory_rows, efficient_rows

    def mark_overdue(self, signature: str) -> None:
        """Record that queued jobs of `signature` cannot join: another signature is overdue."""
        if batch := self._running.get(signature):
            batch.limits.overdue = True

    def count_forward(self, forward: ForwardDone) -> None:
        metrics.forward_rows.labels(forward.model).observe(forward.rows)
        metrics.forward_seconds.labels(forward.model, metrics.rows_label(forward.rows)).observe(forward.seconds)
        for batch in self._running.values():
            if forward.claim_key in batch.slots:
                batch.totals.forwards += 1
                batch.totals.rows += forward.rows
                batch.totals.forward_s += forward.seconds
                batch.max_rows = max(batch.max_rows, forward.rows)

    def remove(self, claimed: ClaimedJob) -> None:
        """Remove a job that left the engine; the last of its signature ends the batch. Safe to repeat."""
        batch = self._running.get(claimed.claim.signature)
        if batch is None or batch.slots.pop(claimed.claim_key, None) is None or batch.slots:
            return
        del self._running[batch.signature]
        batch.ended_s = time.monotonic()
        reason, totals = batch.limits.stopped_by(), batch.totals
        batch.trace.end(reason)
        metrics.batches.labels(batch.first_job.model, reason).inc()
        log.info(
            "batch",
            model=batch.first_job.model,
            signature=batch.signature,
            jobs=totals.jobs,
            max_slots=batch.limits.peak_slots,
            forwards=totals.forwards,
            mean_rows=round(totals.rows / totals.forwards, 2) if totals.forwards else None,
            max_rows=batch.max_rows,
            stopped_by=reason,
            mismatched_fields=batch.mismatched_fields,
            max_wait_ms=batch.max_wait_ms,
            forward_ms=round(1000 * totals.forward_s),
            duration_ms=round(1000 * (batch.ended_s - batch.started_s)),
        )

    @property
    def running_slots(self) -> int:
        """Images in the engine, or on their way to it."""
        return sum(sum(batch.slots.values()) for batch in self._running.values())

    def _start(self, claimed: ClaimedJob) -> _Batch:
        claim, rule_rows = claimed.claim, claimed.spec.max_batch
        limits = BatchLimits(
            max_batch=spec.max_batch if (spec := self._catalog.find(claim.job.model)) else rule_rows,
            rule_rows=rule_rows,
            memory_rows=rule_rows,
            efficient_rows=rule_rows,
            must_run_solo=claim.must_run_solo,
            queued_ms=claim.queued_ms,
            window_ms=claimed.spec.window_ms,
        )
        totals = BatchTotals()
        trace = BatchTrace(claim.job, claim.signature, totals)
        batch = _Batch(claim.signature, claim.job, limits, time.monotonic(), totals, trace)
        if self._latest is not None and not claim.must_run_solo and self._latest.had_room_for(claimed):
            batch.mismatched_fields = mismatched_fields(self._latest.first_job, claim.job)
            for name in batch.mismatched_fields:
                metrics.batch_mismatches.labels(name).inc()
        self._running[claim.signature] = self._latest = batch
        return batch
