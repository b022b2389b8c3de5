"""The number of wanted workers."""

from __future__ import annotations

import pytest

from shared.autoscaling import UNKNOWN_SLOT_S, Fleet, SignatureLoad, slot_seconds, wanted_workers

CURVE = {1: 1.0, 2: 1.1, 4: 1.4, 8: 2.4}  # seconds per forward: a row of eight costs 0.3 of a single row


def load(queued: int = 0, running: int = 0, oldest_s: float = 0.0, **more: object) -> SignatureLoad:
    cost = {"slot_s": 10.0, "rows": 1.0, **more}
    return SignatureLoad(f"demo:64x64x1:{queued}-{running}", queued, running, oldest_s, **cost)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("queued", "rows", "curve", "expected"),
    [
        (8, 1.0, CURVE, 3.0),  # measured solo, but eight are queued and will share
        (2, 1.0, CURVE, 5.5),  # forwards of two rows
        (1, 1.0, CURVE, 10.0),  # one row gains nothing
        (8, 8.0, CURVE, 10.0),  # measured with eight rows already
        (100, 4.0, CURVE, 10 * 0.3 / 0.35),  # measured with four rows
        (8, 1.0, None, 10.0),  # no curve
        (8, 1.0, {1: 1.0, 2: 2.4}, 10.0),  # a shape that gains nothing from batching
        (8, 2.0, {1: 1.0, 2: 2.4}, 10 * 1.0 / 1.2),  # or loses
    ],
)
def test_slot_cost_follows_the_expected_rows(
    queued: int, rows: float, curve: dict[int, float] | None, expected: float
) -> None:
    assert slot_seconds(load(queued, rows=rows, cost_curve=curve)) == pytest.approx(expected)


def test_slot_cost_of_an_unmeasured_model_is_assumed() -> None:
    assert slot_seconds(load(3, slot_s=None)) == UNKNOWN_SLOT_S


@pytest.mark.parametrize(
    ("loads", "fleet", "expected", "reason"),
    [
        ([], Fleet(0, 0), 0, "no jobs are queued"),  # to zero
        ([load(1)], Fleet(0, 0), 1, "10.0 s queued"),  # from zero
        ([load(1, slot_s=0.0)], Fleet(0, 0), 1, "at least 1"),  # at any cost
        ([load(1, slot_s=None)], Fleet(0, 0), 1, "no job has ended yet"),
        ([load(9)], Fleet(1, 1), 3, "90.0 s queued"),  # 90 s of work, target 30 s
        ([load(9, cost_curve=CURVE)], Fleet(1, 1), 1, "27.0 s queued"),  # 27 s when fused
        ([load(running=6)], Fleet(1, 1), 1, "30.0 s running"),  # half of the running work is left
        ([load(3), load(6)], Fleet(0, 0), 3, ""),  # signatures add up
        ([load(1, oldest_s=90)], Fleet(2, 0), 3, "has waited 90 s"),  # the estimate was too low
        ([load(1, oldest_s=90)], Fleet(2, 0, starting=1), 1, ""),  # another worker is starting
        ([load(1, oldest_s=90)], Fleet(2, 0, settled_s=5.0), 1, ""),  # the workers are new
        ([load(1, oldest_s=90)], Fleet(2, 0, settled_s=61.0), 3, "has waited 90 s"),
        ([load(6, slot_s=60.0)], Fleet(0, 0), 4, ""),  # the last jobs start, not end, within the target: 30 of 90 s
        ([load(1, slot_s=600.0)], Fleet(0, 0), 1, ""),  # two workers cannot share one slot
        ([load(8, slot_s=60.0, rows=8.0)], Fleet(0, 0), 1, ""),  # one batch: all start at once
        ([load(16, slot_s=60.0, rows=8.0)], Fleet(0, 0), 2, ""),
        ([load(1, oldest_s=90)], Fleet(0, 0), 1, ""),  # no worker was alive
        ([load(9)], Fleet(0, 0, start_s=80.0), 1, "takes 80 s to start"),  # three would load for longer than they work
        ([load(18)], Fleet(0, 0, start_s=80.0), 2, "start within 80 s with 2"),
        ([load(9)], Fleet(1, 1, start_s=29.0), 3, "start within 30 s"),  # the target is longer
        ([load(1, oldest_s=90)], Fleet(2, 0, start_s=80.0), 1, ""),  # not late yet
        ([load(1, oldest_s=161)], Fleet(2, 0, start_s=80.0), 3, "has waited 161 s"),
        ([load(running=1)], Fleet(4, 3), 3, "3 workers have jobs"),
    ],
)
def test_wanted_workers(loads: list[SignatureLoad], fleet: Fleet, expected: int, reason: str) -> None:
    scale = wanted_workers(loads, fleet, target_s=30.0)
    assert scale.wanted == expected
    assert reason in "; ".join(scale.reasons)
