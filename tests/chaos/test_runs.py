"""Short forms of the runs of `make chaos`, and runs with planted bugs that the checker must report."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from chaos import planted_bugs
from chaos.faults import FAULTS, INDEXES
from chaos.plan import Mix, Plan
from chaos.processes import redis_executable
from chaos.run import Run, Scenario
from chaos.scenarios import EVICTED, PAUSES, PIPELINES, SCENARIOS, SPOT, STEPS
from shared.queue.redis_keys import KEYS

SEED = 1
SHORT_LEASE = {"lease_ms": 1000}
WORKER_FAULTS = dict.fromkeys((*STEPS, "kill_worker", "kill_api:after_submit", "drain_worker"), 1)
REDIS_FAULTS = {"kill_redis": 1, "rewrite_aof": 1, "flush_scripts": 1}

GRAPHS = Mix(children=0.8, failing=0.1, expiring=0.05, dependents=0)
FAILING_SOURCES = Mix(children=0.8, dependents=0.8, failing=0.2, deleted=0, retried=0)

WITH_BUGS = {
    "unfenced_settle": (
        Scenario(50, {"stop_at:before_settle": 1}, workers=2, step_s=0.02, settings=SHORT_LEASE),
        "terminal twice",
    ),
    "no_lease_check": (Scenario(50, workers=2, step_s=0.02, settings={"lease_ms": 8000}), "run again"),
    "submit_twice": (Scenario(50, workers=2, mix=Mix(keyed=1.0, repeated=1.0)), "submitted twice"),
    "first_parent_is_enough": (Scenario(150, workers=2, mix=GRAPHS), "ran before a parent ended"),
    "failed_parent_is_ignored": (Scenario(150, workers=2, mix=GRAPHS), "ran after a failed parent"),
    "failed_source_is_ignored": (Scenario(150, workers=2, mix=FAILING_SOURCES), "ran after a failed parent"),
    "sources_are_not_kept": (Scenario(150, workers=2, mix=PIPELINES), "failed unplanned"),
    "lost_outbox_entry": (Scenario(50, workers=2, webhooks=True), "webhooks lost"),
}

NEEDS_REDIS = pytest.mark.skipif(redis_executable() is None, reason="no redis-server")


@NEEDS_REDIS
async def test_jobs_outlive_the_processes_that_work_on_them(tmp_path: Path) -> None:
    """Workers killed at every step, the API at a submit, and a drain: nothing is lost or done twice."""
    scenario = Scenario(100, WORKER_FAULTS, at_once=4, step_s=0.02, webhooks=True, settings=SHORT_LEASE)
    report = await Run(scenario, scenario.plan(SEED), tmp_path).report()
    assert not report.problems, "\n".join(report.lines())


@NEEDS_REDIS
async def test_jobs_outlive_a_kill_of_redis(tmp_path: Path) -> None:
    scenario = Scenario(60, REDIS_FAULTS, workers=2, run_again=lambda kills: 0)
    report = await Run(scenario, scenario.plan(SEED), tmp_path).report()
    assert not report.problems, "\n".join(report.lines())


@NEEDS_REDIS
async def test_jobs_start_from_the_results_of_others(tmp_path: Path) -> None:
    """Also from those of retries, while workers and Redis are killed and sources are deleted."""
    kinds = {"kill_worker": 1, "kill_at:after_claim": 1, "kill_redis": 1, "kill_api:after_submit": 1}
    scenario = Scenario(100, kinds, workers=2, mix=PIPELINES, step_s=0.02, settings=SHORT_LEASE)
    report = await Run(scenario, scenario.plan(SEED), tmp_path).report()
    assert not report.problems, "\n".join(report.lines())
    counts = ("started from unfinished jobs", "started from retries", "deletions refused", "deleted")
    assert all(report.counts[name] for name in counts), "\n".join(report.lines())


@NEEDS_REDIS
async def test_paused_jobs_wait_and_end_once_resumed(tmp_path: Path) -> None:
    """Also those of killed and drained workers, while the indexes of paused jobs are lost."""
    kinds = {"kill_worker": 1, "drain_worker": 1, "lose_indexes": 1}
    scenario = replace(PAUSES, jobs=80, kinds=kinds, workers=2, step_s=0.02, settings=SHORT_LEASE)
    report = await Run(scenario, scenario.plan(SEED), tmp_path).report()
    assert not report.problems, "\n".join(report.lines())
    assert report.counts["pauses of queued jobs"]


@NEEDS_REDIS
async def test_evicted_workers_leave_their_steps_to_others(tmp_path: Path) -> None:
    """Each step of long jobs is computed once, and their images are those of runs without a stop."""
    settings = SHORT_LEASE | {"drain_timeout_s": 0.2}
    mix, one = replace(SPOT.mix, steps=(30, 60)), {"jobs": 16, "workers": 1, "step_s": 0.02, "every_s": 0}
    scenario = replace(SPOT, kinds=EVICTED, computed=1.0, mix=mix, settings=settings, **one)
    report = await Run(scenario, scenario.plan(SEED), tmp_path).report()
    assert not report.problems, "\n".join(report.lines())
    assert report.counts["jobs run again"]


@NEEDS_REDIS
@pytest.mark.slow
@pytest.mark.parametrize("bug", sorted(WITH_BUGS))
async def test_the_checker_reports_a_planted_bug(bug: str, tmp_path: Path) -> None:
    scenario, problem = WITH_BUGS[bug]
    report = await Run(scenario, scenario.plan(SEED), tmp_path, bug).report()
    assert problem in report.problems, "\n".join(report.lines())


def test_every_planted_bug_has_a_run() -> None:
    assert WITH_BUGS.keys() == planted_bugs.BUGS.keys()


def test_every_scenario_names_faults_that_exist() -> None:
    assert {kind for scenario in SCENARIOS.values() for kind in scenario.kinds} <= FAULTS.keys()


def test_every_index_that_is_lost_exists() -> None:
    assert {kind for kind in INDEXES if KEYS[kind].live} == set(INDEXES)


def test_a_seed_makes_the_same_plan_again() -> None:
    plans = [Plan(seed, 100, kinds={"kill_worker": 5, "kill_redis": 2}) for seed in (1, 1, 2)]
    jobs, faults = [list(islice(plan.submits(), 50)) for plan in plans], [plan.faults() for plan in plans]
    assert jobs[0] == jobs[1] != jobs[2]
    assert faults[0] == faults[1] != faults[2]
    assert [fault.at for fault in faults[0]] == sorted(fault.at for fault in faults[0])
