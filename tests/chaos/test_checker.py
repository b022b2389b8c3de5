"""The checker reports bugs that are planted into the processes of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos import planted_bugs
from chaos.plan import Mix
from chaos.processes import redis_executable
from chaos.run import Scenario, execute

pytestmark = pytest.mark.skipif(redis_executable() is None, reason="no redis-server")

SEED = 7
RUNS = {
    "unfenced_settle": (Scenario(150, {"stop_at:before_settle": 1}, settings={"lease_ms": 1000}), "terminal twice"),
    "no_lease_check": (Scenario(150, run_again=lambda kills: 0), "run again"),
    "submit_twice": (Scenario(50, mix=Mix(keyed=1.0, repeated=1.0)), "submitted twice"),
    "lost_outbox_entry": (Scenario(50, webhooks=True), "webhooks lost"),
}


def test_every_planted_bug_has_a_run() -> None:
    assert RUNS.keys() == planted_bugs.BUGS.keys()


@pytest.mark.parametrize("bug", sorted(RUNS))
async def test_the_checker_reports_a_planted_bug(bug: str, tmp_path: Path) -> None:
    scenario, problem = RUNS[bug]
    report = await execute(scenario, SEED, tmp_path, bug=bug)
    assert problem in report.problems, "\n".join(report.lines())
