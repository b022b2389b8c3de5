"""Groups: the jobs that were submitted with one name in `group`, and their progress."""

from __future__ import annotations

from datetime import datetime

from fusequeue.response_types import Resource


class GroupJobs(Resource):
    """Jobs by state; `queued` without those that are paused."""

    queued: int = 0
    paused: int = 0
    running: int = 0
    succeeded: int = 0
    failed: int = 0
    canceled: int = 0
    expired: int = 0


class Group(Resource):
    """The progress of a group; `eta_s` until the jobs that are not paused have ended, those that wait for others or for
    their time included, None if it is unknown."""

    name: str
    total: int
    jobs: GroupJobs
    first_submitted_at: datetime
    last_submitted_at: datetime
    rate_per_minute: float
    eta_s: float | None = None
    device_seconds: float

    @property
    def ended(self) -> int:
        """How many jobs have ended."""
        return self.total - self.jobs.queued - self.jobs.paused - self.jobs.running
