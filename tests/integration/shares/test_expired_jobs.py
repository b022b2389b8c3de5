"""Jobs past their deadline are ended in small numbers: one tenant's do not lengthen the claims of others."""

from __future__ import annotations

from collections.abc import Callable

from harness.queue import claim_ids, miss_deadline, put

from shared.job import State
from shared.queue import Queue, Submission

MOST = 48
"""The bound of a claim, and what it has read when it is reached."""


async def test_a_claim_ends_few_expired_jobs(queue: Queue, make_submission: Callable[..., Submission]) -> None:
    """300 of one tenant come first; a job of another tenant starts in the same claim, and the rest ends later."""
    late = await put(queue, *[make_submission(tenant="late", deadline_ms=3_600_000) for _ in range(300)])
    await miss_deadline(queue, *late)
    (other,) = await put(queue, make_submission(tenant="other"))
    assert await claim_ids(queue) == [other]

    async def ended() -> int:
        records = await queue.jobs.get_many(late)
        return sum(record is not None and record.state is State.EXPIRED for record in records)

    assert 0 < await ended() <= MOST
    for _ in range(300 // 8):
        assert await claim_ids(queue) == []
    assert await ended() == 300
    assert await queue.maintenance.reconcile() == 0
