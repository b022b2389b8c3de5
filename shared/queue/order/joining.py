"""Whether queued jobs may join a running batch of their signature.

They may, ready or not, unless another signature is overdue, or has a job that must start before the batch could end,
and the next claim would choose it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from shared.queue.order import deadlines
from shared.queue.order.facts import SignatureFacts, SignatureQueue
from shared.queue.order.jobs import lost_since
from shared.queue.order.signatures import Part, Row, SignatureOrder, Step


@dataclass
class Joining:
    """Decides for one running batch; `order` is that of the worker's models."""

    order: SignatureOrder
    queue: SignatureQueue
    overtaken: list[tuple[str, int]] = field(default_factory=list)
    """Signatures and ranks that the jobs overtake by their deadlines."""

    def allowed_steps(self) -> tuple[list[Step], bool]:
        """Return the steps whose jobs can join, and whether queued jobs are held back for another signature."""
        allowed: list[Step] = []
        complete: dict[int, bool] = {}  # of ranks whether all jobs can join
        for step in self.order.steps():
            mine = self.queue.model in step.models
            if self._comes_later(step) or (mine and self._has_overdue_lost(step)):
                break
            if mine:
                allowed.append(step)
                # Jobs of rank 0 can be in two steps.
                complete |= {part.rank: part.ahead is not True or self.order.lowest == 0 for part in step.parts}
        waiting = (rank for rank in range(self.order.lowest + 1) if self.queue.jobs[rank] > 0)
        return allowed, any(not complete.get(rank) for rank in waiting)

    def _comes_later(self, step: Step) -> bool:
        """Return whether an overdue or urgent signature goes before this one at the next claim."""
        if not self._others_overdue(step) and not self._others_urgent(step):
            return False
        rows, mine = self.order.by_tenant(step), self._own_row(step)
        if not rows:
            rows = self.order.by_readiness(step)
            if mine is not None:
                mine = replace(mine, usage=0.0, own_rank=0, turn=deadlines.UNDATED)
        others = (row for row in rows if row.signature != self.queue.signature and self._is_due(row))
        if any(mine is None or mine.key >= row.key for row in others):
            return True
        if mine is not None and mine.start_by is not None:
            self.overtaken += self.order.overtaken(mine, rows)
        return False

    def _is_due(self, row: Row) -> bool:
        overdue = row.sort_ms <= self._overdue_before
        return overdue or (row.start_by is not None and row.start_by <= self._urgent_before)

    @property
    def _overdue_before(self) -> float:
        return self.order.facts.now_ms - self.order.facts.policies.overdue_ms

    @property
    def _urgent_before(self) -> float:
        """Latest starts before this time are urgent: a job that joins now has ended by then."""
        return self.order.facts.now_ms + self.queue.run_ms

    def _others_overdue(self, step: Step) -> bool:
        return any(
            signature != self.queue.signature and ready_ms <= self._overdue_before
            for part in step.parts
            for model in step.models
            if (order := self.order.facts.orders.get((model, part.rank))) is not None
            for signature, ready_ms in order.ready
        )

    def _others_urgent(self, step: Step) -> bool:
        return any(
            one.start_by is not None and one.start_by <= self._urgent_before
            for part in step.parts
            for model in step.models
            if (order := self.order.facts.orders.get((model, part.rank))) is not None
            for tenant in order.tenants
            for one in tenant.signatures
            if one.signature != self.queue.signature
        )

    def _own_row(self, step: Step) -> Row | None:
        """Return the first row of this signature in a step; None if it is not ready."""
        rows = [row for part in step.parts if (row := self._row_of(part)) is not None]
        return min(rows, key=lambda row: row.key, default=None)

    def _row_of(self, part: Part) -> Row | None:
        order, now = self.order.facts.orders.get((self.queue.model, part.rank)), self.order.facts.now_ms
        ready_ms = self.queue.ready_ms[part.rank]
        if order is None or ready_ms is None or ready_ms > now:
            return None
        for lane in self.queue.lanes:
            if lane.rank == part.rank and self.order.includes(part, lane.usage) and lane.limit.allows(1):
                one = SignatureFacts(self.queue.signature, ready_ms, lane.start_by, self.queue.overtaken[part.rank])
                row = self.order.row(self.queue.signature, self.queue.model, part.rank, ready_ms, order)
                return self.order.of_tenant(row, lane.tenant, lane.usage, one)
        return None

    def _has_overdue_lost(self, step: Step) -> bool:
        """Return whether a lost job of this signature has waited for the end of the batch."""
        since = (lost_since(self.queue, part.rank) for part in step.parts)
        return any(at is not None and at <= self._overdue_before for at in since)
