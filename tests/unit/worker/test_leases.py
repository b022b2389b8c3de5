"""When a GPU thread counts as hung: each table row gives its reason."""

from __future__ import annotations

import pytest

from worker.claims.leases import StallLimits, stalled
from worker.engine.engine_status import Activity

LIMITS = StallLimits(factor=20, floor_s=60, loading_s=1800)


@pytest.mark.parametrize(
    ("activity", "silence_s", "hung", "why"),
    [
        (Activity(busy=False, since_s=0), 10_000, False, "an idle thread is not hung"),
        (Activity(busy=True, since_s=0), 59, False, "no forward is hung before the floor"),
        (Activity(busy=True, since_s=0), 61, True, "a first forward has the floor's time"),
        (Activity(busy=True, since_s=0, expected_s=0.1), 61, True, "a quick forward is hung at the floor"),
        (Activity(busy=True, since_s=0, expected_s=10), 199, False, "a slow forward has a multiple of its usual time"),
        (Activity(busy=True, since_s=0, expected_s=10), 201, True, "and not more"),
        (Activity(busy=True, since_s=0, loading=True), 1700, False, "weights can be read over a slow network"),
        (Activity(busy=True, since_s=0, loading=True), 1801, True, "but not without limit"),
        (Activity(busy=True, since_s=float("-inf")), 0, True, "a dead thread is reported as hung"),
    ],
)
def test_silent_gpu_thread_is_hung_after_a_multiple_of_its_expected_time(
    activity: Activity, silence_s: float, hung: bool, why: str
) -> None:
    assert stalled(activity, silence_s, LIMITS) is hung, why
