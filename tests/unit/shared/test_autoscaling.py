"""The number of wanted workers."""

from __future__ import annotations

from typing import Any

import pytest

from shared.autoscaling import (
    Backlog,
    DatedSlots,
    Fleet,
    LimitedTenant,
    ReadyTimes,
    SignatureLoad,
    Targets,
    wanted_workers,
)
from shared.autoscaling.backlog import slot_cost

CURVE = {1: 1.0, 2: 1.1, 4: 1.4, 8: 2.4}  # seconds per forward: a row of eight costs 0.3 of a single row
HOUR = 3600.0
TARGETS = Targets(wait_s=30.0, bulk_window_s=24 * HOUR)


def load(queued: int = 0, running: int = 0, late_s: float = 0.0, **more: Any) -> SignatureLoad:
    fields = {"model": "demo", "slot_s": 10.0, "oldest_wait_s": late_s, "waiting_s": late_s, **more}
    return SignatureLoad(f"demo:64x64x1:{queued}-{running}", queued_slots=queued, running_slots=running, **fields)


def bulk(slots: int, **more: Any) -> SignatureLoad:
    return load(bulk_slots=slots, **more)


def fleet(alive: int = 0, busy: int = 0, *, ready_s: float = 1000.0, last_s: float | None = None, **more: Any) -> Fleet:
    """A fleet that serves "demo"; its first worker is ready since `ready_s`, its last since `last_s`."""
    times = ReadyTimes(ready_s, ready_s if last_s is None else last_s)
    return Fleet(alive, busy, **{"urgent": busy, "serving": {"demo": times} if alive else {}, **more})


NO_WORKERS = Fleet()


def wanted(*loads: SignatureLoad, fleet: Fleet = NO_WORKERS, **more: Any) -> int:
    return wanted_workers(Backlog(loads, **more), fleet, TARGETS).wanted


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
    cost = slot_cost(load(queued, rows=rows, cost_curve=curve))
    assert cost is not None
    assert cost.seconds == pytest.approx(expected)


@pytest.mark.parametrize(
    ("loads", "fleet", "expected", "reason"),
    [
        ([], fleet(), 0, "no jobs are queued"),  # to zero
        ([load(1)], fleet(), 1, "10.0 s queued"),  # from zero
        ([load(1, slot_s=0.0)], fleet(), 1, "at least 1"),  # at any cost
        ([load(9)], fleet(1, 1), 3, "90.0 s queued"),  # 90 s of work, target 30 s
        ([load(9, cost_curve=CURVE)], fleet(1, 1), 1, "27.0 s queued"),  # 27 s when fused
        ([load(running=6)], fleet(1, 1), 1, "30.0 s running"),  # half of the running work is left
        ([load(3), load(6)], fleet(), 3, ""),  # signatures add up
        ([load(6, slot_s=60.0)], fleet(), 4, ""),  # the last jobs start, not end, within the target: 30 of 90 s
        ([load(1, slot_s=600.0)], fleet(), 1, ""),  # two workers cannot share one slot
        ([load(8, slot_s=60.0, rows=8.0)], fleet(), 1, ""),  # one batch: all start at once
        ([load(16, slot_s=60.0, rows=8.0)], fleet(), 2, ""),
        ([load(9)], fleet(start_s=80.0), 1, "takes 80 s to start"),  # three would load for longer than they work
        ([load(18)], fleet(start_s=80.0), 2, "start within 80 s with 2.00 workers"),
        ([load(9)], fleet(1, 1, start_s=29.0), 3, "start within 30 s"),  # the target is longer
        ([load(running=1)], fleet(4, 3), 3, "3 workers have jobs"),
        ([load(9, spared_slots=6.0)], fleet(), 1, "30.0 s queued"),  # checkpoints leave a third of the work
        ([load(9, spared_slots=4.5)], fleet(), 2, "45.0 s queued"),
        ([load(1, spared_slots=1.0)], fleet(), 1, "at least 1"),
    ],
)
def test_jobs_start_within_the_target(loads: list[SignatureLoad], fleet: Fleet, expected: int, reason: str) -> None:
    scale = wanted_workers(Backlog(loads), fleet, TARGETS)
    assert scale.wanted == expected
    assert reason in "; ".join(scale.reasons)


@pytest.mark.parametrize(
    ("late_s", "fleet", "expected"),
    [
        (90, fleet(2, 2), 3),  # the estimate was too low
        (90, fleet(2, 2, ready_s=59.0), 2),  # the workers are new
        (90, fleet(2, 2, ready_s=61.0), 3),
        (90, fleet(2, 2, start_s=80.0), 2),  # not late yet
        (161, fleet(2, 2, start_s=80.0), 3),
        (90, fleet(3, 2, starting=1), 3),  # the worker for it starts
        (90, fleet(2, 2, starting=1), 2),  # one starts already
        (90, fleet(3, 3, last_s=20.0), 3),  # it has become ready: one step a job
        (90, fleet(3, 2, last_s=20.0), 2),
        (90, fleet(3, 3, last_s=40.0), 4),  # it was ready before the job was late
        (90, fleet(5, 2), 2),  # idle workers do not start it: others would not either
        (90, fleet(), 1),  # no worker is alive
        (90, fleet(2, 2, serving={"other": ReadyTimes(1000.0, 1000.0)}), 2),  # none serves its model
    ],
)
def test_a_late_job_wants_one_more_worker(late_s: float, fleet: Fleet, expected: int) -> None:
    assert wanted(load(1, late_s=late_s), fleet=fleet) == expected


def test_a_late_job_raises_the_wanted_workers_by_one_step_in_all() -> None:
    """However often the number is read and followed, and however long the job waits."""
    now, alive, last_ready, seen = 0.0, 2, 0.0, []
    for _ in range(200):
        now += 10.0
        present = fleet(alive, alive, ready_s=now, last_s=now - last_ready)
        seen.append(wanted(load(1, late_s=now), fleet=present))
        assert wanted(load(1, late_s=now), fleet=present) == seen[-1]
        if seen[-1] > alive:
            alive, last_ready = seen[-1], now + 5.0
    assert max(seen) == 3


@pytest.mark.parametrize("queued", [1, 20_000])
def test_a_model_that_no_live_worker_serves_does_not_raise_the_wanted_workers(queued: int) -> None:
    """More of the same workers would not serve it either; the first one may."""
    elsewhere = fleet(1, 0, serving={"other": ReadyTimes(1000.0, 1000.0)})
    alive, seen = elsewhere, []
    for _ in range(50):
        seen.append(wanted(load(queued, late_s=10_000.0), fleet=alive))
        alive = fleet(seen[-1], 0, serving=elsewhere.serving)
    assert set(seen) == {1}
    assert wanted(load(queued, late_s=10.0), fleet=fleet(unavailable=4)) == 1, "no worker can load it"
    scale = wanted_workers(Backlog([load(queued)]), elsewhere, TARGETS)
    assert "no live worker serves these models, which do not count: demo" in scale.reasons


@pytest.mark.parametrize(
    ("loads", "fleet", "expected"),
    [
        ([load(1, slot_s=None)], fleet(), 1),
        ([load(600, slot_s=None)], fleet(), 1),
        ([load(600, slot_s=None, model=name) for name in ("demo", "other", "third")], fleet(), 2),
        ([load(600, slot_s=None), load(6, model="known")], fleet(), 3),  # two for the known one
        ([load(600, slot_s=None)], fleet(2, 2), 2),
        ([bulk(600, slot_s=None)], fleet(), 1),
    ],
)
def test_a_model_of_unknown_cost_wants_one_worker(loads: list[SignatureLoad], fleet: Fleet, expected: int) -> None:
    assert wanted(*loads, fleet=fleet) == expected
    assert any("no job has ended yet" in reason for reason in wanted_workers(Backlog(loads), fleet, TARGETS).reasons)


def test_a_model_of_unknown_cost_wants_no_worker_for_a_paused_tenant() -> None:
    paused = LimitedTenant("paused", 0, 0, {"demo": 4.0}, {"demo": 2.0})
    for queued, running, expected in ((6, 0, 1), (7, 0, 2), (6, 1, 2)):
        loads = load(1, model="known"), load(queued - 2, running, slot_s=None, bulk_slots=2)
        assert wanted(*loads, limited=[paused]) == expected


@pytest.mark.parametrize(
    ("slots", "more", "expected"),
    [
        (20_000, {"slot_s": 0.5}, 1),  # 10,000 s in 24 hours
        (20_000, {"slot_s": 10.0}, 3),  # 200,000 s
        (20_000, {"slot_s": 10.0, "bulk_age_s": 12 * HOUR}, 5),  # half of the window is left
        (20_000, {"slot_s": 10.0, "bulk_age_s": 30 * HOUR}, 19),  # the window is over: an eighth of it, not at once
        (20_000, {"cost_curve": CURVE}, 1),  # 60,000 s in full forwards
        (1, {"slot_s": 100_000.0}, 2),  # longer than the window, but not longer than two
    ],
)
def test_bulk_jobs_end_within_the_window(slots: int, more: dict[str, Any], expected: int) -> None:
    assert wanted(bulk(slots, **more)) == expected


@pytest.mark.parametrize(
    ("dated", "expected"),
    [
        ([(4 * HOUR, 1000, 0)], 1),  # 10,000 of 14,400 s
        ([(2 * HOUR, 1000, 0)], 2),
        ([(2 * HOUR, 1000, 0), (24 * HOUR, 0, 9000)], 2),  # 90,000 s in files have 24 hours
        ([(24 * HOUR, 1000, 49_000)], 6),  # 500,000 s, of which 10,000 are queued
        ([(0.0, 3, 0)], 1),  # nothing is due sooner than in 30 s
        ([(2 * HOUR, 1500, 0)], 2),  # a sample that exceeds what is queued
    ],
)
def test_bulk_jobs_with_a_deadline_end_by_it(dated: list[tuple[float, float, float]], expected: int) -> None:
    rows = [DatedSlots("demo", "t1", due_s, queued, in_files) for due_s, queued, in_files in dated]
    assert wanted(bulk(1000), dated=rows) == expected


def test_bulk_jobs_add_to_the_others() -> None:
    assert wanted(load(9)) == 3  # 2.25
    assert wanted(load(9), bulk(4000)) == 3, "0.46 more fit"
    assert wanted(load(9), bulk(8000)) == 4


@pytest.mark.parametrize(
    ("slots", "alive", "expected"),
    [(25_000, 3, 3), (25_000, 4, 4), (25_000, 9, 4), (20_700, 3, 3), (20_700, 4, 3), (4000, 2, 1)],
)
def test_bulk_jobs_keep_one_worker_more_while_they_need_nearly_as_many(slots: int, alive: int, expected: int) -> None:
    """25,000 need 2.9 workers, 20,700 need 2.4, and 4,000 half of one."""
    assert wanted(bulk(slots), fleet=fleet(alive, alive, urgent=0, bulk_part=1.0)) == expected


def test_workers_with_only_bulk_jobs_are_kept_only_while_none_is_queued() -> None:
    """Otherwise a batch would keep all workers of an earlier burst for its whole window."""
    burst = fleet(16, 16, urgent=2, bulk_part=0.9)
    assert wanted(load(running=100, bulk_slots=20_000, slot_s=0.5), fleet=burst) == 2
    assert wanted(load(running=100), fleet=burst) == 16, "the last ones would be run again"


@pytest.mark.parametrize(
    ("queued", "limit", "running", "fleet", "expected"),
    [
        (20_000, 1, 0, fleet(), 1),
        (20_000, 1, 1, fleet(1, 1), 1),
        (20_000, 6, 0, fleet(), 2),  # 60 s
        (20_000, 6, 5, fleet(2, 2), 2),
    ],
)
def test_a_limited_tenant_counts_up_to_its_free_quota(
    queued: int, limit: int, running: int, fleet: Fleet, expected: int
) -> None:
    limited = LimitedTenant("small", limit, running, {"demo": queued}, {})
    assert wanted(load(queued, running), fleet=fleet, limited=[limited]) == expected
    more = wanted(load(queued + 9, running), fleet=fleet, limited=[limited])
    assert more in (expected + 2, expected + 3), "nine jobs of another tenant count in full"


def test_forwards_of_a_limited_tenant_are_no_fuller_than_its_quota() -> None:
    limited = LimitedTenant("small", 1, 0, {"demo": 800}, {})
    scale = [wanted(load(800, slot_s=60.0, cost_curve=CURVE), limited=tenants) for tenants in ([limited], [])]
    assert scale == [1, 83]


@pytest.mark.parametrize(("limit", "expected"), [(1, 1), (2, 2), (100, 12)])
def test_bulk_jobs_of_a_limited_tenant_want_no_more_workers_than_its_limit_fills(limit: int, expected: int) -> None:
    limited = LimitedTenant("small", limit, 0, {}, {"demo": 100_000})
    assert wanted(bulk(100_000), limited=[limited]) == expected
