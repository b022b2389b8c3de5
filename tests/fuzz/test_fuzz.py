"""Short form of `make fuzz`."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos.processes import redis_executable

from fuzz.__main__ import PARTS, fuzz

SEED = 1
SECONDS = 4.0


@pytest.mark.parametrize("part", PARTS)
async def test_nothing_is_found_in_a_few_seconds(part: str, tmp_path: Path) -> None:
    if redis_executable() is None:
        pytest.skip("no redis-server")
    assert await fuzz(tmp_path, [part], SEED, SECONDS) == []
