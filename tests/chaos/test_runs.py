"""Short forms of the runs of `make chaos`."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.plan import Plan
from chaos.processes import redis_executable
from chaos.run import Scenario, execute
from chaos.scenarios import SCENARIOS, STEPS

SEED = 1


def test_a_seed_makes_the_same_plan_again() -> None:
    plans = [Plan(seed, 100, kinds={"kill_worker": 5, "kill_redis": 2}) for seed in (1, 1, 2)]
    jobs = [[submit for submit, _ in zip(plan.submits(), range(50), strict=False)] for plan in plans]
    faults = [plan.faults() for plan in plans]
    assert jobs[0] == jobs[1] != jobs[2]
    assert faults[0] == faults[1] != faults[2]
    assert [fault.at for fault in faults[0]] == sorted(fault.at for fault in faults[0])


@pytest.mark.skipif(redis_executable() is None, reason="no redis-server")
async def test_jobs_outlive_the_processes_that_work_on_them(tmp_path: Path) -> None:
    """Workers killed at every step, the API at a submit, Redis once; drains: nothing is lost or done twice."""
    kinds = dict.fromkeys((*STEPS, "kill_worker", "kill_api:after_submit", "kill_redis", "drain_worker"), 1)
    scenario = Scenario(300, kinds, at_once=4, webhooks=True, settings={"lease_ms": 1000})
    report = await execute(scenario, SEED, tmp_path)
    assert not report.problems, "\n".join(report.lines())


def test_every_scenario_names_faults_that_exist() -> None:
    from chaos.faults import FAULTS

    assert {kind for scenario in SCENARIOS.values() for kind in scenario.kinds} <= FAULTS.keys()
