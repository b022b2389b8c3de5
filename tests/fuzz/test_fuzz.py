"""Short form of `make fuzz`: the parts that need a stack. The other parts have short forms next to what they test."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos.processes import redis_executable

from fuzz.__main__ import fuzz


@pytest.mark.slow
@pytest.mark.skipif(redis_executable() is None, reason="no redis-server")
async def test_requests_of_the_openapi_description_and_bytes_almost_http_find_nothing(tmp_path: Path) -> None:
    assert await fuzz(tmp_path, ["openapi", "raw_http"], seed=1, seconds=20.0) == []
