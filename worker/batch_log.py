"""What became of each batch, and why it held no more: one log line, and the metrics of the same facts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from shared.config.models_file import Catalog
from shared.job import Job
from shared.runtime import metrics
from shared.signature import differences
from worker.engine import ForwardDone
from worker.job_runner import ClaimedJob

log = structlog.get_logger()


@dataclass(frozen=True)
class BatchLimits:
    """What bounded a batch. All but the times count pictures: `seats` the most that it held at once, `max_batch` what
    the models file allows, `ruled` what a batch rule leaves of that, `fits` what memory does, `paying` where one more
    no longer pays.
    """

    seats: int
    max_batch: int
    ruled: int
    fits: int
    paying: int
    solo: bool = False
    overdue: bool = False
    queued_ms: int = 0
    window_ms: int = 0


def stopped_by(growth: BatchLimits) -> str:
    """Return why a batch held no more.

    `memory` and `cap` (more would not pay, or a rule forbids it) are told where they bind below `max_batch`, `full`
    at it; `overdue`: jobs waited, and another signature's had waited too long; `window`: no more had come when the
    first had waited for company long enough; `alone`: it may have none, or none was likely to come.
    """
    if growth.solo:
        return "solo"
    if growth.seats >= growth.fits < growth.ruled:
        return "memory"
    if growth.seats >= min(growth.paying, growth.ruled) < growth.max_batch:
        return "cap"
    if growth.seats >= growth.max_batch:
        return "full"
    if growth.overdue:
        return "overdue"
    return "window" if growth.queued_ms >= growth.window_ms else "solo"


@dataclass
class _Batch:
    """Jobs of one signature, from the first claim to the last one's leaving the engine."""

    signature: str
    first: Job
    max_batch: int
    ruled: int
    window_ms: int
    solo: bool
    began_s: float
    fits: int = field(init=False)
    paying: int = field(init=False)
    ended_s: float | None = None
    overdue: bool = False
    queued_ms: int = 0
    longest_wait_ms: int = 0
    jobs: int = 0
    seats: int = 0
    forwards: int = 0
    rows: int = 0
    most_rows: int = 0
    seconds: float = 0.0
    batch_mismatches: tuple[str, ...] = ()
    inside: dict[str, int] = field(default_factory=dict)  # seats of each run

    def __post_init__(self) -> None:
        self.fits = self.paying = self.ruled

    def growth(self) -> BatchLimits:
        return BatchLimits(
            seats=self.seats,
            max_batch=self.max_batch,
            ruled=self.ruled,
            fits=self.fits,
            paying=self.paying,
            solo=self.solo,
            overdue=self.overdue,
            queued_ms=self.queued_ms,
            window_ms=self.window_ms,
        )


class BatchLog:
    """Follows the batches of one worker. All on the event loop."""

    def __init__(self, catalog: Catalog, clock: Callable[[], float] = time.monotonic) -> None:
        self._catalog = catalog
        self._clock = clock
        self._open: dict[str, _Batch] = {}
        self._latest: _Batch | None = None

    def admit(self, run: ClaimedJob) -> None:
        """Note that a job was claimed; the first of its signature begins a batch."""
        signature, seats = run.claim.signature, run.claim.job.slots
        batch = self._open.get(signature)
        if batch is None:
            batch = self._begin(run)
        batch.jobs += 1
        batch.inside[run.key] = seats
        batch.seats = max(batch.seats, sum(batch.inside.values()))
        batch.longest_wait_ms = max(batch.longest_wait_ms, run.claim.queued_ms)

    def bound(self, signature: str, fits: int, paying: int) -> None:
        """Note how many pictures fit together, and how many pay."""
        if batch := self._open.get(signature):
            batch.fits, batch.paying = fits, paying

    def hold_back(self, signature: str) -> None:
        """Note that jobs wait which may not join: another signature is overdue."""
        if batch := self._open.get(signature):
            batch.overdue = True

    def forward(self, facts: ForwardDone) -> None:
        """Count a forward."""
        metrics.forward_rows.labels(facts.model).observe(facts.rows)
        metrics.forward_seconds.labels(facts.model, metrics.rows_label(facts.rows)).observe(facts.seconds)
        batch = next((one for one in self._open.values() if facts.claim_key in one.inside), None)
        if batch is not None:
            batch.forwards += 1
            batch.rows += facts.rows
            batch.most_rows = max(batch.most_rows, facts.rows)
            batch.seconds += facts.seconds

    def leave(self, run: ClaimedJob) -> None:
        """Note that a job left the engine; the last of its signature ends the batch. It may be told twice of one."""
        batch = self._open.get(run.claim.signature)
        if batch is None or batch.inside.pop(run.key, None) is None or batch.inside:
            return
        del self._open[batch.signature]
        batch.ended_s = self._clock()
        self._tell(batch)

    @property
    def seats(self) -> int:
        """Pictures in the engine, or on their way into it."""
        return sum(sum(batch.inside.values()) for batch in self._open.values())

    def _begin(self, run: ClaimedJob) -> _Batch:
        claim, spec = run.claim, run.spec
        batch = _Batch(
            signature=claim.signature,
            first=claim.job,
            max_batch=self._catalog.get(claim.job.model).max_batch,
            ruled=spec.max_batch,
            window_ms=spec.window_ms,
            solo=claim.solo,
            began_s=self._clock(),
            queued_ms=claim.queued_ms,
        )
        other = self._latest
        if other is not None and not claim.solo and _passed_by(other, run):
            batch.batch_mismatches = differences(other.first, claim.job)
            for name in batch.batch_mismatches:
                metrics.batch_mismatches.labels(name).inc()
        self._open[claim.signature] = self._latest = batch
        return batch

    def _tell(self, batch: _Batch) -> None:
        reason = stopped_by(batch.growth())
        metrics.batches.labels(batch.first.model, reason).inc()
        log.info(
            "batch",
            model=batch.first.model,
            signature=batch.signature,
            jobs=batch.jobs,
            most_seats=batch.seats,
            forwards=batch.forwards,
            mean_rows=round(batch.rows / batch.forwards, 2) if batch.forwards else None,
            most_rows=batch.most_rows,
            stopped_by=reason,
            batch_mismatches=batch.batch_mismatches,
            longest_wait_ms=batch.longest_wait_ms,
            forward_ms=round(1000 * batch.seconds),
            duration_ms=round(1000 * ((batch.ended_s or batch.began_s) - batch.began_s)),
        )


def _passed_by(batch: _Batch, run: ClaimedJob) -> bool:
    """Tell whether a job waited while a batch with room for it ran, which its signature kept it out of."""
    waited = batch.ended_s is None or run.queued_since_s < batch.ended_s
    room = min(batch.ruled, batch.fits, batch.paying) - batch.seats
    return waited and batch.signature != run.claim.signature and not batch.solo and run.claim.job.slots <= room
