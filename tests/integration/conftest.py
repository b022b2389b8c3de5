"""Fixtures of the integration tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from harness.api_process import Server
from harness.ports import free_port
from harness.s3_process import admin, wait_until_listening
from harness.waiting import wait_until

from shared.queue import QueueClient


def pytest_asyncio_loop_factories() -> dict[str, Any]:
    """Return the event loop of the processes: its errors are not those of asyncio, as after a connection was lost."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny pipeline of every family."""
    from harness import jobs as factory  # slow import of torch, only for tests with models

    folder = tmp_path_factory.mktemp("models")
    for family in factory.FAMILIES:
        factory.save(family, folder / family)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tiny_models: Path) -> Callable[[str], Path]:
    """Return the folder of the tiny pipeline of a name, which is saved once."""
    from tiny import registry

    def folder(name: str) -> Path:
        folder = tiny_models / name
        return folder if folder.exists() else registry.save_tiny(name, folder)

    return folder


@pytest.fixture
def quick_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load models without their self-check, and search for garbage after evictions among new objects only.

    For tests of what comes after a load: its check takes as long, and a search in all that is imported half a second.
    """
    monkeypatch.setattr("worker.engine.engine.run_self_check", lambda _model, _device: None)
    monkeypatch.setattr("worker.engine.models.model_cache.gc.get_freeze_count", lambda: 0)
    monkeypatch.setattr("worker.engine.models.model_cache.gc.unfreeze", lambda: None)


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the scripts that any queue of this process runs."""
    counts: Counter[str] = Counter()
    run = QueueClient.run

    async def counted(client: QueueClient, name: str, *args: Any, **named: Any) -> Any:
        counts[name] += 1
        return await run(client, name, *args, **named)

    monkeypatch.setattr(QueueClient, "run", counted)
    return counts


@pytest.fixture
def start(durable_server: Any, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Start API processes; their logs are shown when the test fails."""
    started: list[Server] = []

    def build(**settings: str) -> Server:
        server = Server(durable_server.url, tmp_path, **settings)
        started.append(server)
        wait_until(lambda: server.responds("/readyz"), "the API is ready")
        return server

    yield build
    for server in started:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait(60)
        print(server.log.read_text()[-4000:])


@pytest.fixture(scope="module")
def module_server(redis_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An API process for the tests of a module that leave nothing in it that another one would notice."""
    server = Server(redis_server.url, tmp_path_factory.mktemp("module"))
    wait_until(lambda: server.responds("/readyz"), "the API is ready")
    yield server
    server.stop()
    print(server.log.read_text()[-4000:])


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an S3 server with the bucket `images` and the credentials `test`: a new moto, or `TEST_S3_URL`."""
    if given := os.environ.get("TEST_S3_URL"):
        admin(given).create_bucket(Bucket="images")
        yield given
        return
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    log = tmp_path_factory.mktemp("moto") / "log"
    with open(log, "wb") as out:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stdout=out, stderr=out
        )
    try:
        wait_until_listening(url, server, log)
        admin(url).create_bucket(Bucket="images")
        yield url
    finally:
        server.terminate()
        server.wait(60)
