"""A Redis that loses all its data does not open a service that required keys."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.api_process import Server
from harness.http_server import BODY, ROOT
from harness.waiting import wait_until
from redis import Redis

from api.auth import CACHE_S

KEYED = ("missing_api_key", "invalid_api_key")


@pytest.fixture
def start(durable_server: Any, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Start API processes of one namespace on one storage folder."""
    servers: list[Server] = []
    namespace = f"t{os.urandom(6).hex()}"

    def run(**settings: str) -> Server:
        servers.append(Server(durable_server.url, tmp_path, namespace=namespace, **settings))
        wait_until(lambda: servers[-1].responds("/healthz"), "the API responds")
        return servers[-1]

    yield run
    for server in servers:
        if server.process.poll() is None:
            server.stop()


def create_key(server: Server, **changes: str) -> str:
    """Create a key as an operator does who has only Redis' URL."""
    chosen = {"redis_url": server.settings.redis_url, "namespace": server.settings.namespace, **changes}
    env = os.environ | {f"FUSEQUEUE_{name.upper()}": value for name, value in chosen.items()}
    command = [sys.executable, "-m", "cli.main", "keys", "create", "--data-dir", "/nonexistent"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


def code(server: Server, **headers: str) -> str:
    response = httpx.post(f"{server.url}/v1/jobs", json=BODY, headers=headers, timeout=30)
    return "" if response.is_success else str(response.json()["code"])


def lose_data(redis: Any) -> None:
    """Kill the server, delete its files, and start it again on the same port."""
    redis.kill()
    for path in redis.folder.glob("appendonly*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    redis.start()
    with Redis.from_url(redis.url) as client:
        assert not [name for name in client.scan_iter() if b"keys_created" in name], "the data are gone"


def test_a_keyed_service_stays_keyed_when_redis_has_lost_its_data(
    start: Callable[..., Server], durable_server: Any
) -> None:
    """The running API, a restarted one, and one that never saw the key."""
    server = start()
    idle = start()
    assert code(server) == ""
    token = create_key(server)
    wait_until(lambda: code(server) in KEYED, "keys are required")
    wait_until(lambda: "keys_marked" in server.log.read_text(), "the API has recorded it in the storage")
    lose_data(durable_server)
    wait_until(lambda: code(server, Authorization=f"Bearer {token}") in KEYED, "Redis responds, and the key is lost")
    assert code(server) in KEYED
    wait_until(lambda: code(idle) in KEYED, "the other API reads it from the storage")
    kept_until = time.monotonic() + 2 * CACHE_S
    while time.monotonic() < kept_until:
        assert code(server) in KEYED, "also when what it cached is outdated"
    assert server.stop() == 0
    restarted = start()
    assert code(restarted) in KEYED
    again = create_key(restarted)
    assert code(restarted, Authorization=f"Bearer {again}") == "", "a new key opens it"


def test_the_command_records_the_first_key_in_the_storage(
    start: Callable[..., Server], durable_server: Any, tmp_path: Path
) -> None:
    """No API runs while the key is made and Redis loses it."""
    server = start()
    assert code(server) == ""
    assert server.stop() == 0
    create_key(server, storage_dir=str(tmp_path / "storage"))
    lose_data(durable_server)
    assert code(start()) in KEYED


def test_an_api_with_silent_storage_at_its_start_is_closed_until_it_responds(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    """It cannot know whether Redis has lost a key; a valid key is served meanwhile."""
    folder = tmp_path / "storage"
    folder.symlink_to(folder)  # a loop, which no read can follow
    server = start()
    assert code(server) == "storage_unavailable"
    folder.unlink()
    wait_until(lambda: code(server) == "", "the storage says that there was no key")


def test_a_key_is_served_while_the_storage_is_silent(start: Callable[..., Server], tmp_path: Path) -> None:
    (tmp_path / "storage").symlink_to(tmp_path / "storage")
    server = start()
    token = create_key(server)
    wait_until(lambda: code(server, Authorization=f"Bearer {token}") == "", "the key is valid")
    assert code(server) == "missing_api_key", "a key exists, whatever the storage would say"
