"""Fixtures of the integration tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from api_process import Server
from waiting import wait_until


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny pipeline of every family, made once."""
    import factory  # here, so that tests without models do not wait for torch

    folder = tmp_path_factory.mktemp("models")
    for family in factory.FAMILIES:
        factory.save(family, folder / family)
    return folder


@pytest.fixture
def start(durable_server: Any, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Start API processes; what they logged is shown when the test fails."""
    started: list[Server] = []

    def build(**settings: str) -> Server:
        server = Server(durable_server.url, tmp_path, **settings)
        started.append(server)
        wait_until(lambda: server.answers("/readyz"), "the API is ready", 30)
        return server

    yield build
    for server in started:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait(10)
        print(server.log.read_text()[-4000:])
