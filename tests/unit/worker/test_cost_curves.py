"""Batch cost curves: how many rows are efficient, and what is measured, saved and forgotten."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shared.autoscaling.efficient_rows import efficient_rows
from shared.queue import Queue
from worker import cost_curves
from worker.cost_curves import MAX_SAMPLES, MIN_SAMPLES, CostCurves
from worker.engine.protocol import ForwardDone

QWEN_512 = {1: 1.0, 2: 2 / 1.8, 4: 4 / 2.8, 8: 8 / 3.1}
QWEN_1024 = {1: 1.0, 2: 2 / 1.02, 4: 4 / 1.02}


@pytest.mark.parametrize(
    ("curve", "cap", "rows", "why"),
    [
        ({}, 8, 8, "nothing measured: only the cap is known"),
        ({1: 1.0}, 8, 2, "one row measured: try two"),
        ({1: 1.0, 2: 1.1}, 8, 4, "two rows are efficient: try four"),
        (QWEN_512, 8, 8, "the published 512 curve gains up to eight rows"),
        (QWEN_512, 4, 4, "the cap limits a curve that still gains"),
        ({4: 22.3, 8: 41.9}, 8, 8, "a row costs 12% less: small images on a CPU"),
        ({4: 22.3, 8: 44.0}, 8, 4, "a row costs 3% less: not enough"),
        (QWEN_1024, 8, 1, "the published 1024 curve gains two percent at two rows: not worth waiting for"),
        ({1: 1.0, 2: 1.0, 4: 3.9}, 8, 2, "four rows cost more than two forwards of two"),
        ({1: 1.0, 2: 2.0, 4: 2.1}, 4, 4, "two rows are not efficient, four are"),
        (
            {1: 11.5, 2: 15.6, 3: 19.0, 4: 23.0, 5: 29.0, 6: 30.2, 7: 35.5, 8: 37.6},
            8,
            8,
            "forwards of a small UNet on a busy machine: five and seven rows were measured too slow",
        ),
        (
            {1: 11.5, 2: 15.6, 4: 22.7, 7: 34.0, 8: 39.5},
            8,
            8,
            "compared with seven rows, eight measured 5% too slow would look like a loss",
        ),
        ({7: 1.0, 8: 9.0}, 12, 12, "nothing of half the rows to compare with: only the cap is known"),
        ({1: 1.0, 2: 1.2, 4: 2.4, 6: 3.5, 8: 4.8}, 8, 2, "the processor is full at two rows"),
        ({4: 1.0}, 8, 8, "only a larger count measured: double it"),
        ({1: 1.0, 16: 1.0}, 8, 2, "counts above the cap are ignored"),
    ],
)
def test_efficient_rows(curve: dict[int, float], cap: int, rows: int, why: str) -> None:
    """The largest count for which more rows make each row cheaper."""
    assert efficient_rows(curve, cap) == rows, why


def forward(rows: int, seconds: float, shape: str = "4x8x8", padding: int = 0) -> ForwardDone:
    return ForwardDone("demo", rows, rows, seconds, "cpu", shape, "job_1:1", padding=padding)


def test_time_between_forwards_counts() -> None:
    """With a small model a forward takes as long for eight rows as for four, but each row has its noise scheduler."""
    curves = CostCurves()
    for rows in (4, 8):
        for _ in range(MIN_SAMPLES):
            curves.add("s", replace(forward(rows, 0.01), own_code_s=0.08 * rows))
    assert curves.rows("s", 8) == 4


def measured(seconds: dict[int, float], samples: int = MIN_SAMPLES) -> CostCurves:
    curves = CostCurves()
    for rows, each in seconds.items():
        for _ in range(samples):
            curves.add("s", forward(rows, each))
    return curves


def test_unknown_signature_gets_the_cap() -> None:
    assert CostCurves().rows("s", 8) == 8


def test_inefficient_rows_are_not_used() -> None:
    """Two rows that take twice the time of one gain nothing."""
    assert measured({1: 1.0, 2: 2.0}).rows("s", 8) == 1


def test_few_samples_are_not_trusted() -> None:
    """A single slow forward decides nothing."""
    assert measured({1: 1.0, 2: 2.0}, samples=MIN_SAMPLES - 1).rows("s", 8) == 8


def test_inefficient_rows_are_tried_again_when_samples_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine may have been busy."""
    curves = measured({1: 1.0, 2: 2.0})
    monkeypatch.setattr(cost_curves, "SAMPLES_KEPT_S", -1.0)
    assert curves.rows("s", 8) == 8


def test_inefficient_rows_are_tried_again_after_many_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even after a short time: a slow moment may have cost the worker half of its rows."""
    monkeypatch.setattr(cost_curves, "SAMPLES_KEPT_FORWARDS", 100)
    curves = measured({1: 1.0, 2: 2.0})
    for _ in range(99 - MIN_SAMPLES):
        curves.add("s", forward(1, 1.0))
    assert curves.rows("s", 8) == 1
    for _ in range(MIN_SAMPLES):
        curves.add("s", forward(1, 1.0))
    assert curves.rows("s", 8) == 2


def test_slow_moment_does_not_reduce_rows() -> None:
    """Twenty forwards that took a quarter longer do not halve the rows."""
    curves = measured({4: 0.0223, 8: 0.0410}, samples=MAX_SAMPLES)
    for _ in range(20):
        curves.add("s", forward(8, 0.0510))
    assert curves.rows("s", 8) == 8


async def test_efficient_rows_are_saved_when_they_change_and_before_they_expire(
    fake_queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches start with as many queued slots as are efficient; Redis keeps the number for a day."""
    key = fake_queue.client.redis_keys.efficient_rows("s")
    curves = measured({1: 1.0, 2: 2.0})
    curves.rows("s", 8)
    await curves.save(fake_queue)
    assert await fake_queue.client.redis.get(key) == "1"
    await fake_queue.client.redis.delete(key)
    curves.rows("s", 8)
    await curves.save(fake_queue)
    assert await fake_queue.client.redis.get(key) is None
    monkeypatch.setattr(cost_curves, "RESEND_AFTER_S", -1.0)
    curves.rows("s", 8)
    await curves.save(fake_queue)
    assert await fake_queue.client.redis.get(key) == "1"


async def test_number_of_curves_is_bounded(fake_queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients choose sizes: only the newest signatures and shapes are kept."""
    monkeypatch.setattr(cost_curves, "MAX_CURVES", 5)
    curves = CostCurves()
    for number in range(20):
        for _ in range(MIN_SAMPLES):
            curves.add(f"s{number}", forward(1, 1.0, f"4x8x{number}"))
            curves.add(f"s{number}", forward(2, 2.0, f"4x8x{number}"))
        assert curves.rows(f"s{number}", 8) == 1
        await curves.save(fake_queue)
    assert curves.rows("s19", 8) == 1
    assert curves.rows("s0", 8) == 8
    assert all(len(kept) <= 6 for kept in vars(curves).values())


def test_padding_counts_as_rows() -> None:
    """A reproducible job's forward takes the time of all rows that it is padded to."""
    curves = CostCurves()
    for _ in range(MIN_SAMPLES):
        curves.add("s", forward(1, 1.0, padding=3))
    assert curves.rows("s", 16) == 8, "twice the four measured rows, not twice one"
