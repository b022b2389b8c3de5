"""Fixtures of the tests of the API with real clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import RedisServer
from harness.api_thread import ApiThread


@pytest.fixture
def serve(redis_server: RedisServer, tmp_path: Path) -> Iterator[Callable[..., ApiThread]]:
    """Start APIs in threads; tests of the process itself use `start`."""
    started: list[ApiThread] = []

    def build(**settings: Any) -> ApiThread:
        started.append(ApiThread(redis_server.url, tmp_path, **settings))
        return started[-1]

    yield build
    for server in started:
        server.stop()
