"""Decisions of a worker: each row of a table says why."""

from __future__ import annotations

import pytest

from shared.job import Priority
from worker.claiming import (
    LONGEST_LOAD_S,
    UNKNOWN_LOAD_S,
    ClaimRequest,
    RunningJob,
    asks,
    efficient_rows,
    leading,
    loads_ms,
)

QWEN_512 = {1: 1.0, 2: 2 / 1.8, 4: 4 / 2.8, 8: 8 / 3.1}
QWEN_1024 = {1: 1.0, 2: 2 / 1.02, 4: 4 / 1.02}


@pytest.mark.parametrize(
    ("curve", "cap", "rows", "why"),
    [
        ({}, 8, 8, "nothing measured: the operator's cap is all that is known"),
        ({1: 1.0}, 8, 2, "one row measured: try two"),
        ({1: 1.0, 2: 1.1}, 8, 4, "two rows paid: try four"),
        (QWEN_512, 8, 8, "the published 512 curve gains up to eight rows"),
        (QWEN_512, 4, 4, "the cap wins over a curve that still gains"),
        ({4: 22.3, 8: 41.9}, 8, 8, "a row costs 12% less: small pictures on a CPU"),
        ({4: 22.3, 8: 44.0}, 8, 4, "a row costs 3% less: not worth it either"),
        (QWEN_1024, 8, 1, "the published 1024 curve gains two percent at two rows: not worth the wait"),
        ({1: 1.0, 2: 1.0, 4: 3.9}, 8, 2, "the step from two to four rows costs more than it brings"),
        ({1: 1.0, 2: 2.0, 4: 2.1}, 4, 4, "two rows did not pay, four of them do"),
        (
            {1: 11.5, 2: 15.6, 3: 19.0, 4: 23.0, 5: 29.0, 6: 30.2, 7: 35.5, 8: 37.6},
            8,
            8,
            "a small UNet's forwards beside other work: five and seven rows took longer than they should have",
        ),
        (
            {1: 11.5, 2: 15.6, 4: 22.7, 7: 34.0, 8: 39.5},
            8,
            8,
            "from seven rows to eight a twentieth more than it should be would make it look like a loss",
        ),
        ({7: 1.0, 8: 9.0}, 12, 12, "with nothing of half the rows to compare with, the cap is all that is known"),
        ({1: 1.0, 2: 1.2, 4: 2.4, 6: 3.5, 8: 4.8}, 8, 2, "the processor is full at two rows: none of the others pays"),
        ({4: 1.0}, 8, 8, "only a larger count measured: double it"),
        ({1: 1.0, 16: 1.0}, 8, 2, "counts above the cap do not speak for what is below it"),
    ],
)
def test_rows_stop_where_one_more_no_longer_pays(curve: dict[int, float], cap: int, rows: int, why: str) -> None:
    """A forward takes rows for as long as each makes all of them cheaper."""
    assert efficient_rows(curve, cap) == rows, why


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
    assert asks(seated, rows=8, largest=16, aside=aside) == wanted, why


def test_the_leading_signature_is_that_of_the_first_interactive_job() -> None:
    """As in the engine: priority, then age."""
    assert leading([bulk(8, "a"), urgent(1, "b"), urgent(1, "c")]) == "b"
    assert leading([bulk(8, "a"), bulk(1, "b")]) == "a"


@pytest.mark.parametrize("aside", [0, 3, 8, 100])
def test_rows_set_aside_are_bounded_whatever_comes(aside: int) -> None:
    """Taking all that is asked for, again and again, never sets more aside than allowed, nor fills two forwards."""
    seated = [bulk(8)]
    while wanted := asks(seated, rows=8, largest=8, aside=aside):
        ask = wanted[0]
        seated.append(RunningJob(ask.signature or "b", ask.seats, ask.lowest is URGENT))
        together = sum(one.seats for one in seated if one.signature == leading(seated))
        set_aside = sum(one.seats for one in seated) - min(8, together)
        assert set_aside <= aside
    assert sum(one.seats for one in seated if one.interactive) <= 8


@pytest.mark.parametrize(
    ("loaded", "measured_s", "expected", "why"),
    [
        ((), {}, {"a": 1000 * UNKNOWN_LOAD_S, "b": 1000 * UNKNOWN_LOAD_S}, "nothing was ever loaded: a guess"),
        (("a",), {"a": 4.0}, {"a": 0, "b": 4000}, "in memory; the other is taken for what was measured"),
        ((), {"a": 4.0, "b": 0.5}, {"a": 4000, "b": 500}, "both were pushed out: each as it took"),
        ((), {"a": 1e4, "b": 1e-9}, {"a": 1000 * LONGEST_LOAD_S, "b": 1}, "bounded; 0 would mean in memory"),
    ],
)
def test_what_a_load_takes(
    loaded: tuple[str, ...], measured_s: dict[str, float], expected: dict[str, float], why: str
) -> None:
    assert loads_ms(("a", "b"), loaded, measured_s) == expected, why


def test_what_could_not_be_loaded_is_left_to_others() -> None:
    """Unless it is in memory after all."""
    assert loads_ms(("a", "b", "c"), ("b",), {"a": 4.0}, failed=("a", "b")) == {"a": -60000, "b": 0, "c": 4000}
