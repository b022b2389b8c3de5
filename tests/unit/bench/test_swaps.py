"""The simulation of model loads: every job runs, and the policy of production saves loads."""

from __future__ import annotations

from bench.swaps import Demand, InMemoryFirst, OldestFirst, SwapSimulation


def test_serving_models_in_memory_first_saves_loads_and_waits() -> None:
    """Compared with the oldest job first, on the same jobs."""
    demand = Demand("three on two", 2, 20.0, 0.6, (3, 2, 1), span_s=1800.0)
    in_memory, oldest = (SwapSimulation(demand, policy, seed=2).run() for policy in (InMemoryFirst(), OldestFirst()))
    assert len(in_memory.waits_s) == len(oldest.waits_s) == len(demand.arrivals(2))
    assert 2 * in_memory.loads < oldest.loads
    assert in_memory.wait_s(0.95) < oldest.wait_s(0.95)


def test_as_many_workers_as_models_load_each_once() -> None:
    """Each worker keeps its model, though both are idle most of the time."""
    demand = Demand("two on two", 2, 20.0, 0.1, (1, 1), span_s=1800.0)
    assert SwapSimulation(demand, InMemoryFirst(), seed=1).run().loads == 2
