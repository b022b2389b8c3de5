"""What a worker learns from its forwards."""

from __future__ import annotations

import pytest

from shared.queue import Queue
from worker import cost_curves
from worker.cost_curves import SAMPLES, TRUSTED_SAMPLES, CostCurves
from worker.engine import ForwardDone

FORWARD = ForwardDone("demo", 1, 1, 1.0, "cpu", "4x8x8", "job_1:1")


def learned(seconds: dict[int, float], samples: int = TRUSTED_SAMPLES) -> CostCurves:
    made = CostCurves()
    for rows, each in seconds.items():
        for _ in range(samples):
            made.measure("s", ForwardDone("demo", rows, rows, each, "cpu", "4x8x8", "job_1:1"))
    return made


def test_an_unknown_signature_takes_what_the_operator_allows() -> None:
    """Nothing measured means the cap."""
    assert CostCurves().rows("s", 8) == 8


def test_rows_that_do_not_pay_are_not_seated() -> None:
    """Two rows that take twice the time of one bring nothing."""
    assert learned({1: 1.0, 2: 2.0}).rows("s", 8) == 1


def test_a_few_forwards_are_no_proof() -> None:
    """A count is believed after several measurements, so that a hiccup decides nothing."""
    assert learned({1: 1.0, 2: 2.0}, samples=TRUSTED_SAMPLES - 1).rows("s", 8) == 8


def test_what_did_not_pay_is_tried_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Old measurements are forgotten: the machine may have been busy with something else."""
    made = learned({1: 1.0, 2: 2.0})
    monkeypatch.setattr(cost_curves, "MEMORY_S", -1.0)
    assert made.rows("s", 8) == 8


def test_what_did_not_pay_is_tried_again_after_many_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where little time has passed: it may have been a slow moment, and cost the worker half of its rows."""
    monkeypatch.setattr(cost_curves, "MEMORY_FORWARDS", 100)
    made = learned({1: 1.0, 2: 2.0})
    for _ in range(99 - TRUSTED_SAMPLES):
        made.measure("s", FORWARD)
    assert made.rows("s", 8) == 1
    for _ in range(TRUSTED_SAMPLES):
        made.measure("s", FORWARD)
    assert made.rows("s", 8) == 2


def test_a_slow_moment_takes_no_rows() -> None:
    """Twenty forwards in a row that took a quarter longer are no reason to go on with half as many rows."""
    made = learned({4: 0.0223, 8: 0.0410}, samples=SAMPLES)
    for _ in range(20):
        made.measure("s", ForwardDone("demo", 8, 8, 0.0510, "cpu", "4x8x8", "job_1:1"))
    assert made.rows("s", 8) == 8


async def test_what_pays_is_told_when_it_changes_and_before_redis_forgets_it(
    fake_queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue starts batches of as many seats as pay; its memory of that lasts a day."""
    name = fake_queue.keys.paying("s")
    made = learned({1: 1.0, 2: 2.0})
    made.rows("s", 8)
    await made.teach(fake_queue)
    assert await fake_queue.redis.get(name) == "1"
    await fake_queue.redis.delete(name)
    made.rows("s", 8)
    await made.teach(fake_queue)
    assert await fake_queue.redis.get(name) is None
    monkeypatch.setattr(cost_curves, "TELL_AGAIN_S", -1.0)
    made.rows("s", 8)
    await made.teach(fake_queue)
    assert await fake_queue.redis.get(name) == "1"


async def test_what_is_learned_is_bounded(fake_queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients choose sizes: the newest signatures and shapes are kept."""
    monkeypatch.setattr(cost_curves, "MAX_KEPT", 5)
    made = CostCurves()
    for at in range(20):
        for _ in range(TRUSTED_SAMPLES):
            made.measure(f"s{at}", ForwardDone("demo", 1, 1, 1.0, "cpu", f"4x8x{at}", "job_1:1"))
            made.measure(f"s{at}", ForwardDone("demo", 2, 2, 2.0, "cpu", f"4x8x{at}", "job_1:1"))
        assert made.rows(f"s{at}", 8) == 1
        await made.teach(fake_queue)
    assert made.rows("s19", 8) == 1
    assert made.rows("s0", 8) == 8
    assert all(len(kept) <= 6 for kept in vars(made).values())


def test_padding_counts_as_rows() -> None:
    """A reproducible job's forward takes the time of all the rows that it is filled up to."""
    made = CostCurves()
    for _ in range(TRUSTED_SAMPLES):
        made.measure("s", ForwardDone("demo", 1, 1, 1.0, "cpu", "4x8x8", "job_1:1", padding=3))
    assert made.rows("s", 16) == 8, "twice the four rows that are known, not twice one"
