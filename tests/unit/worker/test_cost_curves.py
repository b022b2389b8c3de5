"""What a worker learns from its forwards."""

from __future__ import annotations

import pytest

from shared.queue import Queue
from worker import cost_curves
from worker.cost_curves import MAX_SAMPLES, MIN_SAMPLES, CostCurves, efficient_rows
from worker.engine import ForwardDone

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


FORWARD = ForwardDone("demo", 1, 1, 1.0, "cpu", "4x8x8", "job_1:1")


def learned(seconds: dict[int, float], samples: int = MIN_SAMPLES) -> CostCurves:
    made = CostCurves()
    for rows, each in seconds.items():
        for _ in range(samples):
            made.add("s", ForwardDone("demo", rows, rows, each, "cpu", "4x8x8", "job_1:1"))
    return made


def test_an_unknown_signature_takes_what_the_operator_allows() -> None:
    """Nothing measured means the cap."""
    assert CostCurves().rows("s", 8) == 8


def test_rows_that_do_not_pay_are_not_seated() -> None:
    """Two rows that take twice the time of one bring nothing."""
    assert learned({1: 1.0, 2: 2.0}).rows("s", 8) == 1


def test_a_few_forwards_are_no_proof() -> None:
    """A count is believed after several measurements, so that a hiccup decides nothing."""
    assert learned({1: 1.0, 2: 2.0}, samples=MIN_SAMPLES - 1).rows("s", 8) == 8


def test_what_did_not_pay_is_tried_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Old measurements are forgotten: the machine may have been busy with something else."""
    made = learned({1: 1.0, 2: 2.0})
    monkeypatch.setattr(cost_curves, "SAMPLES_KEPT_S", -1.0)
    assert made.rows("s", 8) == 8


def test_what_did_not_pay_is_tried_again_after_many_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where little time has passed: it may have been a slow moment, and cost the worker half of its rows."""
    monkeypatch.setattr(cost_curves, "SAMPLES_KEPT_FORWARDS", 100)
    made = learned({1: 1.0, 2: 2.0})
    for _ in range(99 - MIN_SAMPLES):
        made.add("s", FORWARD)
    assert made.rows("s", 8) == 1
    for _ in range(MIN_SAMPLES):
        made.add("s", FORWARD)
    assert made.rows("s", 8) == 2


def test_a_slow_moment_takes_no_rows() -> None:
    """Twenty forwards in a row that took a quarter longer are no reason to go on with half as many rows."""
    made = learned({4: 0.0223, 8: 0.0410}, samples=MAX_SAMPLES)
    for _ in range(20):
        made.add("s", ForwardDone("demo", 8, 8, 0.0510, "cpu", "4x8x8", "job_1:1"))
    assert made.rows("s", 8) == 8


async def test_what_pays_is_told_when_it_changes_and_before_redis_forgets_it(
    fake_queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue starts batches of as many seats as pay; its memory of that lasts a day."""
    name = fake_queue.client.redis_keys.paying("s")
    made = learned({1: 1.0, 2: 2.0})
    made.rows("s", 8)
    await made.save(fake_queue)
    assert await fake_queue.client.redis.get(name) == "1"
    await fake_queue.client.redis.delete(name)
    made.rows("s", 8)
    await made.save(fake_queue)
    assert await fake_queue.client.redis.get(name) is None
    monkeypatch.setattr(cost_curves, "RESEND_AFTER_S", -1.0)
    made.rows("s", 8)
    await made.save(fake_queue)
    assert await fake_queue.client.redis.get(name) == "1"


async def test_what_is_learned_is_bounded(fake_queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients choose sizes: the newest signatures and shapes are kept."""
    monkeypatch.setattr(cost_curves, "MAX_CURVES", 5)
    made = CostCurves()
    for at in range(20):
        for _ in range(MIN_SAMPLES):
            made.add(f"s{at}", ForwardDone("demo", 1, 1, 1.0, "cpu", f"4x8x{at}", "job_1:1"))
            made.add(f"s{at}", ForwardDone("demo", 2, 2, 2.0, "cpu", f"4x8x{at}", "job_1:1"))
        assert made.rows(f"s{at}", 8) == 1
        await made.save(fake_queue)
    assert made.rows("s19", 8) == 1
    assert made.rows("s0", 8) == 8
    assert all(len(kept) <= 6 for kept in vars(made).values())


def test_padding_counts_as_rows() -> None:
    """A reproducible job's forward takes the time of all the rows that it is filled up to."""
    made = CostCurves()
    for _ in range(MIN_SAMPLES):
        made.add("s", ForwardDone("demo", 1, 1, 1.0, "cpu", "4x8x8", "job_1:1", padding=3))
    assert made.rows("s", 16) == 8, "twice the four rows that are known, not twice one"
