"""Memory limits: what is learned when memory runs out, as tables."""

from __future__ import annotations

import pytest

from worker.engine.scheduling.memory_limits import (
    FIRST_RETRY_S,
    LONGEST_RETRY_S,
    MAX_CAPS,
    MIN_SUCCESSES,
    Cap,
    MemoryLimits,
    after_failure,
    after_success,
    allowed,
)


@pytest.mark.parametrize(
    ("cap", "now_s", "calls", "reason"),
    [
        (Cap(4, 8, 0), 1e6, 4, "time is not enough: no forward of four has run since"),
        (
            Cap(4, 8, 0, successes=MIN_SUCCESSES),
            FIRST_RETRY_S - 1,
            4,
            "forwards are not enough: other memory can still be in use",
        ),
        (Cap(4, 8, 0, successes=MIN_SUCCESSES), FIRST_RETRY_S, 6, "half-way to the count that failed"),
        (Cap(6, 8, 0, successes=MIN_SUCCESSES), FIRST_RETRY_S, 7, "then the count below it"),
        (
            Cap(7, 8, 0, successes=MIN_SUCCESSES),
            FIRST_RETRY_S,
            8,
            "then the count that failed: memory may have become free",
        ),
        (Cap(1, 2, 0, successes=MIN_SUCCESSES), FIRST_RETRY_S, 2, "a limit of one row is not permanent"),
        (Cap(4, 8, 0, retry_s=600, successes=MIN_SUCCESSES), 599, 4, "after failures the next attempt is later"),
    ],
)
def test_a_cap_is_raised_step_by_step(cap: Cap, now_s: float, calls: int, reason: str) -> None:
    """A failed attempt costs one forward: it is made after successes and time, at most half-way."""
    assert allowed(cap, now_s) == calls, reason


@pytest.mark.parametrize(
    ("cap", "calls", "after", "reason"),
    [
        (Cap(4, 8, 0), 3, Cap(4, 8, 0), "fewer calls than fit change nothing"),
        (Cap(4, 8, 0), 4, Cap(4, 8, 0, successes=1), "one more success"),
        (
            Cap(4, 8, 0, retry_s=40, successes=30),
            6,
            Cap(6, 8, 9, retry_s=40),
            "six fit now, and must succeed repeatedly again",
        ),
        (
            Cap(7, 8, 0, retry_s=40, successes=30),
            8,
            Cap(8, 16, 9),
            "the count that failed fits: nothing is known above it",
        ),
    ],
)
def test_a_successful_forward_updates_the_cap(cap: Cap, calls: int, after: Cap, reason: str) -> None:
    """The cap follows what fitted."""
    assert after_success(cap, calls, now_s=9) == after, reason


@pytest.mark.parametrize(
    ("cap", "calls", "fits", "after", "reason"),
    [
        (None, 8, 4, Cap(4, 8, 9), "the first time, half is tried"),
        (Cap(4, 8, 0), 6, 4, Cap(4, 6, 9, retry_s=2 * FIRST_RETRY_S), "a failed attempt: back, and a longer delay"),
        (Cap(4, 8, 0), 4, 2, Cap(2, 4, 9, retry_s=2 * FIRST_RETRY_S), "what fitted before can fail later"),
        (Cap(4, 8, 0, retry_s=LONGEST_RETRY_S), 5, 4, Cap(4, 5, 9, retry_s=LONGEST_RETRY_S), "the delay is bounded"),
    ],
)
def test_running_out_of_memory_lowers_the_cap(cap: Cap | None, calls: int, fits: int, after: Cap, reason: str) -> None:
    """Each failure doubles the time to the next attempt."""
    assert after_failure(cap, calls, fits, now_s=9) == after, reason


@pytest.mark.parametrize("capacity", range(1, 8))
def test_a_cap_finds_what_fits_in_a_few_attempts(capacity: int) -> None:
    """With memory for `capacity` of 8 calls: six forwards fail at most in three minutes, `capacity` then run."""
    now, failures = 0.0, 0
    memory = MemoryLimits(clock=lambda: now)
    while now < 180:
        calls = memory.allowed("kind", 8)
        while calls > capacity:
            failures += 1
            known = memory.fits("kind")
            fits = known if known is not None and known < calls else max(1, calls // 2)
            memory.record_failure("kind", calls, fits)
            calls = fits
        memory.record_success("kind", calls)
        now += 0.1
    assert memory.fits("kind") == capacity
    assert failures <= 6


def test_caps_are_bounded() -> None:
    """Clients choose the sizes: the oldest failure is forgotten first."""
    memory = MemoryLimits()
    for kind in range(MAX_CAPS + 1):
        memory.record_failure(kind, 2, 1)
    assert memory.fits(0) is None
    assert memory.fits(1) == memory.fits(MAX_CAPS) == 1
