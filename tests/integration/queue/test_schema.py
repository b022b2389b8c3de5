"""A queue of another schema version is refused by every program, and left as it is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from harness.http_server import ROOT
from harness.ports import free_port
from redis import Redis

from shared.errors import IncompatibleRedis
from shared.job import QUEUE_SCHEMA
from shared.queue import Queue
from shared.queue.connections.redis_traits import examine

OLD_DATA = {"schema": str(QUEUE_SCHEMA - 1), "auth": "keys", "paying:demo:64x64": "4"}

PROGRAMS = {
    "api": ("api", "--port", "0"),
    "worker": ("worker",),
    "chores": ("api.chores",),
    "keys": ("cli.main", "keys", "list"),
    "tenants": ("cli.main", "tenants", "list"),
}


def contents(redis_url: str) -> dict[str, Any]:
    """Return the strings below the default namespace."""
    with Redis.from_url(redis_url, decode_responses=True) as redis:
        return {name.partition("}:")[2]: redis.get(name) for name in redis.scan_iter("{fq:default}:*")}


def write_old_data(redis_url: str) -> None:
    with Redis.from_url(redis_url) as redis:
        for name, value in OLD_DATA.items():
            redis.set(f"{{fq:default}}:{name}", value)


def run(
    module: str, *arguments: str, env: Mapping[str, str], timeout_s: float = 60
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *arguments]
    own = {name: value for name, value in os.environ.items() if not name.startswith("FUSEQUEUE_")}
    return subprocess.run(
        command,
        env={**own, **env},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_refuses_the_data_of_the_version_before(durable_server: Any, tmp_path: Path, program: str) -> None:
    """It ends with a message that names both versions and the way out; it reads and changes nothing."""
    write_old_data(durable_server.url)
    env = {
        "FUSEQUEUE_REDIS_URL": durable_server.url,
        "FUSEQUEUE_STORAGE_DIR": str(tmp_path / "storage"),
        "FUSEQUEUE_DEVICE": "cpu",
        "FUSEQUEUE_MODELS": str(ROOT / "models.toml"),
    }
    result = run(*PROGRAMS[program], env=env)
    assert result.returncode == 1, result.stdout
    assert f"has schema {QUEUE_SCHEMA - 1}, this program has schema {QUEUE_SCHEMA};" in result.stdout
    assert "FUSEQUEUE_NAMESPACE" in result.stdout
    assert contents(durable_server.url) == OLD_DATA


def test_up_refuses_a_data_folder_of_the_version_before(durable_server: Any, tmp_path: Path) -> None:
    """Its Redis loads the old data; the API refuses it, and `up` shows why."""
    write_old_data(durable_server.url)
    durable_server.stop()
    data = tmp_path / "data"
    data.mkdir()
    (data / "redis").symlink_to(durable_server.folder)
    options = ("--data-dir", str(data), "--port", str(free_port()))
    result = run("cli.main", "up", *options, env={"FUSEQUEUE_DEVICE": "cpu"}, timeout_s=100)
    assert result.returncode == 1, result.stdout
    assert f"has schema {QUEUE_SCHEMA - 1}, this program has schema {QUEUE_SCHEMA};" in result.stdout
    assert "another --data-dir" in result.stdout
    durable_server.start()
    assert contents(durable_server.url) == OLD_DATA


@pytest.mark.parametrize(("version", "remedy"), [(QUEUE_SCHEMA - 1, "earlier version"), (99, "upgrade this program")])
async def test_other_schema_versions_are_refused(queue: Queue, version: int, remedy: str) -> None:
    """The check and the doctor name both versions and the remedy."""
    await queue.client.redis.set(queue.client.redis_keys.schema, version)
    with pytest.raises(IncompatibleRedis, match=rf"schema {version}, .*schema {QUEUE_SCHEMA};.*{remedy}"):
        await queue.check()
    assert int(await queue.client.redis.get(queue.client.redis_keys.schema)) == version
    (trait,) = [one for one in await examine(queue.client) if one.name == "queue schema"]
    assert (trait.seen, trait.fatal) == (str(version), True)
    assert remedy in trait.remedy


async def test_an_empty_redis_gets_this_schema(queue: Queue) -> None:
    """From then on other versions refuse it."""
    await queue.check()
    assert int(await queue.client.redis.get(queue.client.redis_keys.schema)) == QUEUE_SCHEMA
