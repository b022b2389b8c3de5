"""The simulator of loads: it serves every job, and tells what it saves to know what is in memory."""

from __future__ import annotations

from bench.swaps import ByRipening, Demand, Fleet, InMemoryFirst


def test_knowing_what_is_in_memory_saves_loads_and_waits() -> None:
    """The queue's own decision against whatever ripened first, on the same jobs."""
    demand = Demand("three on two", 2, 20.0, 0.6, (3, 2, 1), span_s=1800.0)
    settled, blind = (Fleet(demand, policy, seed=2).run() for policy in (InMemoryFirst(), ByRipening()))
    assert len(settled.waits_s) == len(blind.waits_s) == len(demand.arrivals(2))
    assert 2 * settled.loads < blind.loads
    assert settled.wait_s(0.95) < blind.wait_s(0.95)


def test_as_many_workers_as_models_load_each_once() -> None:
    """Each worker keeps to its own, though both are idle most of the time."""
    assert Fleet(Demand("two on two", 2, 20.0, 0.1, (1, 1), span_s=1800.0), InMemoryFirst(), seed=1).run().loads == 2
