"""The policies of the order, and the limits of tenants."""

from __future__ import annotations

from typing import NamedTuple


class OrderPolicies(NamedTuple):
    """The policies that decide the order, as `FUSEQUEUE_OVERDUE_MS` and so on set them."""

    overdue_ms: int
    aging_ms: int
    bulk_share: float
    interactive_allowance_s: float


class Reservation(NamedTuple):
    """An overdue job that needs more slots than its tenant's limit leaves: the tenant's other jobs, those of a higher
    priority aside, do not start before it."""

    job_id: str
    rank: int
    slots: int

    def holds_back(self, job_id: str, rank: int) -> bool:
        return job_id != self.job_id and rank >= self.rank


class Limit(NamedTuple):
    """A tenant's limit of running slots, 0 for none, those in use, whether the tenant is paused, and the job that the
    slots which become free are kept for."""

    most: int
    used: int
    paused: bool
    reserved: Reservation | None = None

    def holds_back(self, job_id: str, rank: int) -> bool:
        """Return whether a job waits for the one that slots are kept for."""
        return self.reserved is not None and self.reserved.holds_back(job_id, rank)

    def allows(self, slots: int, claimed: int = 0) -> bool:
        """Return whether the tenant can have `slots` more beside those that are claimed now.

        A job above its tenant's limit starts while no other job of the tenant runs: otherwise it would never start.
        """
        used = self.used + claimed
        return not self.paused and (not self.most or used <= 0 or used + slots <= self.most)

    def holds_some_back(self, jobs: int) -> bool:
        """Return whether some of so many queued jobs of the tenant have to wait until others have ended."""
        return self.paused or (self.most > 0 and self.used + jobs > self.most)
