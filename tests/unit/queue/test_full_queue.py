"""When to submit again to a full queue."""

from __future__ import annotations

import pytest

from shared.queue.quotas import full_queue_retry_s

RETRIES = [
    ("no job has ended lately", 10_000, None, 5),
    ("a hundredth of the queue has ended", 10_000, 100.0, 10),
    ("whole seconds", 10_000, 101.0, 11),
    ("a small or fast queue", 10, 100.0, 1),
    ("a slow one: another try is cheap", 100_000, 1000.0, 60),
]


@pytest.mark.parametrize(("why", "limit", "gap_ms", "seconds"), RETRIES, ids=[row[0] for row in RETRIES])
def test_when_a_full_queue_has_room(why: str, limit: int, gap_ms: float | None, seconds: int) -> None:
    assert full_queue_retry_s(limit, gap_ms) == seconds, why
