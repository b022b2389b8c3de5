"""Short form of `make attack`."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos.processes import redis_executable

from attack import victim
from attack.__main__ import measure

pytestmark = [pytest.mark.slow, pytest.mark.skipif(redis_executable() is None, reason="no redis-server")]
SLOW_MACHINE = 5  # times the bounds


@pytest.mark.parametrize("name", ["endless inputs", "invalid keys"])
async def test_another_tenant_is_served_during_an_attack(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for what, bound in victim.BOUNDS_S.items():
        monkeypatch.setitem(victim.BOUNDS_S, what, SLOW_MACHINE * bound)
    result = await measure(name, tmp_path, seconds=1.0)
    assert result.problems == []
    assert sum(result.counts.values()) > 10


async def test_a_bound_that_does_not_hold_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(victim.BOUNDS_S, "read", 0.0)
    result = await measure("none", tmp_path, seconds=0.5)
    assert any(problem.startswith("read: ") for problem in result.problems)
