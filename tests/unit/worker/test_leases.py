"""When a GPU thread counts as hung: each row says why."""

from __future__ import annotations

import pytest

from worker.engine import Activity
from worker.leases import StallLimits, stalled

LIMITS = StallLimits(factor=20, floor_s=60, loading_s=1800)


@pytest.mark.parametrize(
    ("activity", "silence_s", "hung", "why"),
    [
        (Activity(busy=False, since_s=0), 10_000, False, "nothing to do is no hang"),
        (Activity(busy=True, since_s=0), 59, False, "no forward is hung before the floor"),
        (Activity(busy=True, since_s=0), 61, True, "a first forward has the floor's time and no more"),
        (Activity(busy=True, since_s=0, expected_s=0.1), 61, True, "a quick forward is hung at the floor"),
        (Activity(busy=True, since_s=0, expected_s=10), 199, False, "a slow forward has many times what it takes"),
        (Activity(busy=True, since_s=0, expected_s=10), 201, True, "and no more than that"),
        (Activity(busy=True, since_s=0, loading=True), 1700, False, "weights may come over a slow network"),
        (Activity(busy=True, since_s=0, loading=True), 1801, True, "but not for ever"),
        (Activity(busy=True, since_s=float("-inf")), 0, True, "a thread that died is told as a hang"),
    ],
)
def test_a_silent_gpu_thread_is_hung_after_a_multiple_of_what_it_should_take(
    activity: Activity, silence_s: float, hung: bool, why: str
) -> None:
    """The bound follows what the present work took before."""
    assert stalled(activity, silence_s, LIMITS) is hung, why
