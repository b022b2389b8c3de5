"""What is concluded from memory that ran out, as tables."""

from __future__ import annotations

import pytest

from worker.engine.scheduling.memory_limits import (
    FIRST_WAIT_S,
    LONGEST_WAIT_S,
    MOST_CAPS,
    PROOFS,
    Cap,
    MemoryLimits,
    after_failure,
    after_success,
    allowed,
)


@pytest.mark.parametrize(
    ("cap", "now_s", "calls", "why"),
    [
        (Cap(4, 8, 0), 1e6, 4, "time alone proves nothing: no forward of four has run since"),
        (
            Cap(4, 8, 0, proofs=PROOFS),
            FIRST_WAIT_S - 1,
            4,
            "nor do forwards alone: what held memory may be there still",
        ),
        (Cap(4, 8, 0, proofs=PROOFS), FIRST_WAIT_S, 6, "half-way to what failed"),
        (Cap(6, 8, 0, proofs=PROOFS), FIRST_WAIT_S, 7, "and on, to the number next to it"),
        (Cap(7, 8, 0, proofs=PROOFS), FIRST_WAIT_S, 8, "at last what failed itself: memory may have come free"),
        (Cap(1, 2, 0, proofs=PROOFS), FIRST_WAIT_S, 2, "a single row too is no verdict for ever"),
        (Cap(4, 8, 0, wait_s=600, proofs=PROOFS), 599, 4, "after failures the next try waits longer"),
    ],
)
def test_a_cap_is_raised_with_care(cap: Cap, now_s: float, calls: int, why: str) -> None:
    """A try that fails costs one forward: it is made after proofs and time, and no further than half-way."""
    assert allowed(cap, now_s) == calls, why


@pytest.mark.parametrize(
    ("cap", "calls", "after", "why"),
    [
        (Cap(4, 8, 0), 3, Cap(4, 8, 0), "fewer than fit prove nothing"),
        (Cap(4, 8, 0), 4, Cap(4, 8, 0, proofs=1), "one proof more"),
        (Cap(4, 8, 0, wait_s=40, proofs=30), 6, Cap(6, 8, 9, wait_s=40), "six fit now; they are to be proven anew"),
        (Cap(7, 8, 0, wait_s=40, proofs=30), 8, Cap(8, 16, 9), "what failed fits: nothing is known above it any more"),
    ],
)
def test_what_a_forward_that_ends_well_teaches(cap: Cap, calls: int, after: Cap, why: str) -> None:
    """The cap follows what was seen to fit."""
    assert after_success(cap, calls, now_s=9) == after, why


@pytest.mark.parametrize(
    ("cap", "calls", "fits", "after", "why"),
    [
        (None, 8, 4, Cap(4, 8, 9), "the first time: half of it is tried"),
        (Cap(4, 8, 0), 6, 4, Cap(4, 6, 9, wait_s=2 * FIRST_WAIT_S), "a try that failed: back, and longer to the next"),
        (Cap(4, 8, 0), 4, 2, Cap(2, 4, 9, wait_s=2 * FIRST_WAIT_S), "what did fit may fit no more"),
        (Cap(4, 8, 0, wait_s=LONGEST_WAIT_S), 5, 4, Cap(4, 5, 9, wait_s=LONGEST_WAIT_S), "the wait is bounded"),
    ],
)
def test_what_running_out_of_memory_teaches(cap: Cap | None, calls: int, fits: int, after: Cap, why: str) -> None:
    """Each failure doubles the time to the next try."""
    assert after_failure(cap, calls, fits, now_s=9) == after, why


@pytest.mark.parametrize("room", range(1, 8))
def test_a_cap_finds_what_fits_in_a_few_tries(room: int) -> None:
    """With memory for `room` of 8 calls: in three minutes at most six forwards fail, and `room` run together."""
    now, failures = 0.0, 0
    memory = MemoryLimits(clock=lambda: now)
    while now < 180:
        calls = memory.allowed("kind", 8)
        while calls > room:
            failures += 1
            known = memory.fits("kind")
            fits = known if known is not None and known < calls else max(1, calls // 2)
            memory.ran_out("kind", calls, fits)
            calls = fits
        memory.ran("kind", calls)
        now += 0.1
    assert memory.fits("kind") == room
    assert failures <= 6


def test_caps_are_bounded() -> None:
    """Clients choose sizes: the kind that failed longest ago is forgotten first."""
    memory = MemoryLimits()
    for kind in range(MOST_CAPS + 1):
        memory.ran_out(kind, 2, 1)
    assert memory.fits(0) is None
    assert memory.fits(1) == memory.fits(MOST_CAPS) == 1
