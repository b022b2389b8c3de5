"""Decisions of a worker: each row of a table says why."""

from __future__ import annotations

import pytest

from shared.job import Priority
from worker.claiming import (
    HINT_TRUSTED_S,
    MAX_LOAD_S,
    UNKNOWN_LOAD_S,
    ClaimRequest,
    InteractiveHint,
    RunningJob,
    claim_requests,
    leading_signature,
    load_times_ms,
)


def bulk(seats: int = 1, signature: str = "a") -> RunningJob:
    return RunningJob(signature, seats)


def urgent(seats: int = 1, signature: str = "a") -> RunningJob:
    return RunningJob(signature, seats, interactive=True)


ANY, URGENT = Priority.BULK, Priority.INTERACTIVE


@pytest.mark.parametrize(
    ("seated", "aside", "wanted", "why"),
    [
        ([], 8, [ClaimRequest(None, 16, ANY)], "an idle worker starts what is ripe, up to the largest batch"),
        (
            [bulk(5)],
            8,
            [ClaimRequest("a", 3, ANY), ClaimRequest("a", 8, URGENT), ClaimRequest(None, 16, URGENT)],
            "free seats are for all; interactive jobs may set aside the rows that run",
        ),
        (
            [bulk(8)],
            8,
            [ClaimRequest("a", 8, URGENT), ClaimRequest(None, 16, URGENT)],
            "a full worker still takes interactive jobs, of its own signature or another",
        ),
        (
            [bulk(8)],
            3,
            [ClaimRequest("a", 3, URGENT)],
            "no more than may be set aside; another signature would set all aside",
        ),
        ([bulk(8)], 0, [], "with nothing to be set aside a full worker is full"),
        ([bulk(8), urgent(3)], 8, [ClaimRequest("a", 5, URGENT)], "until interactive jobs fill the forward"),
        ([bulk(8), urgent(8)], 8, [], "then others can have them"),
        (
            [bulk(8), urgent(2, "b")],
            8,
            [ClaimRequest("b", 6, URGENT)],
            "beside parked rows the leading signature takes no bulk, and a third signature has to wait",
        ),
        ([bulk(8), urgent(8, "b")], 8, [], "nothing beyond a forward of the leading signature"),
        (
            [bulk(4), urgent(1, "b")],
            2,
            [ClaimRequest("b", 7, URGENT)],
            "free seats of the leading one set nothing more aside",
        ),
        (
            [urgent(3)],
            8,
            [ClaimRequest("a", 5, ANY), ClaimRequest("a", 5, URGENT)],
            "beside interactive jobs others may join",
        ),
        ([RunningJob("a", 1, solo=True)], 8, [], "a job that was lost runs alone in its process"),
        ([RunningJob("a", 1, interactive=True, solo=True)], 8, [], "an interactive one too"),
    ],
)
def test_what_a_worker_asks_for(seated: list[RunningJob], aside: int, wanted: list[ClaimRequest], why: str) -> None:
    """Eight rows go on together here, sixteen of another signature might."""
    assert claim_requests(seated, rows=8, max_batch=16, max_preempted=aside) == wanted, why


def test_the_leading_signature_is_that_of_the_first_interactive_job() -> None:
    """As in the engine: priority, then age."""
    assert leading_signature([bulk(8, "a"), urgent(1, "b"), urgent(1, "c")]) == "b"
    assert leading_signature([bulk(8, "a"), bulk(1, "b")]) == "a"


@pytest.mark.parametrize("aside", [0, 3, 8, 100])
def test_rows_set_aside_are_bounded_whatever_comes(aside: int) -> None:
    """Taking all that is asked for, again and again, never sets more aside than allowed, nor fills two forwards."""
    seated = [bulk(8)]
    while wanted := claim_requests(seated, rows=8, max_batch=8, max_preempted=aside):
        ask = wanted[0]
        seated.append(RunningJob(ask.signature or "b", ask.slots, ask.lowest is URGENT))
        together = sum(one.slots for one in seated if one.signature == leading_signature(seated))
        set_aside = sum(one.slots for one in seated) - min(8, together)
        assert set_aside <= aside
    assert sum(one.slots for one in seated if one.interactive) <= 8


@pytest.mark.parametrize(
    ("loaded", "measured_s", "expected", "why"),
    [
        ((), {}, {"a": 1000 * UNKNOWN_LOAD_S, "b": 1000 * UNKNOWN_LOAD_S}, "nothing was ever loaded: a guess"),
        (("a",), {"a": 4.0}, {"a": 0, "b": 4000}, "in memory; the other is taken for what was measured"),
        ((), {"a": 4.0, "b": 0.5}, {"a": 4000, "b": 500}, "both were pushed out: each as it took"),
        ((), {"a": 1e4, "b": 1e-9}, {"a": 1000 * MAX_LOAD_S, "b": 1}, "bounded; 0 would mean in memory"),
    ],
)
def test_what_a_load_takes(
    loaded: tuple[str, ...], measured_s: dict[str, float], expected: dict[str, float], why: str
) -> None:
    assert load_times_ms(("a", "b"), loaded, measured_s) == expected, why


def test_what_could_not_be_loaded_is_left_to_others() -> None:
    """Unless it is in memory after all."""
    assert load_times_ms(("a", "b", "c"), ("b",), {"a": 4.0}, failed=("a", "b")) == {"a": -60000, "b": 0, "c": 4000}


def test_it_asks_until_told_that_none_waits_and_again_at_a_hint() -> None:
    """And of itself after a while, whatever was told."""
    now = [100.0]
    urgent = InteractiveHint(lambda: now[0])
    assert urgent.likely
    urgent.clear(urgent.count)
    assert not urgent.likely
    urgent.set()
    assert urgent.likely
    urgent.clear(urgent.count)
    now[0] += HINT_TRUSTED_S
    assert urgent.likely


def test_an_answer_from_before_the_newest_hint_is_worth_nothing() -> None:
    """The job of which the hint tells may have come after the queue looked."""
    urgent = InteractiveHint(lambda: 100.0)
    asked = urgent.count
    urgent.set()
    urgent.clear(asked)
    assert urgent.likely
