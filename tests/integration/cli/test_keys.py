"""`fusequeue keys` and `fusequeue tenants`, on a real Redis."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from redis import Redis
from typer.testing import CliRunner

from cli.main import app
from cli.up import environment
from shared.config.settings import Settings
from shared.errors import RedisUnavailable
from shared.queue import Queue

ROOT = Path(__file__).resolve().parents[3]
Command = Callable[..., "Completed"]


class Completed(NamedTuple):
    """Exit status and output of a command."""

    status: int
    out: str
    err: str


@pytest.fixture
def command(redis_server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Command]:
    """Run commands in a new namespace."""
    namespace = f"t{os.urandom(6).hex()}"
    monkeypatch.setenv("FUSEQUEUE_REDIS_URL", redis_server.url)
    monkeypatch.setenv("FUSEQUEUE_NAMESPACE", namespace)

    def run(*arguments: str) -> Completed:
        result = CliRunner().invoke(app, arguments)
        return Completed(result.exit_code, result.stdout, result.stderr)

    yield run
    with Redis.from_url(redis_server.url) as redis:
        for name in redis.scan_iter(match=f"*fq:{namespace}*"):
            redis.delete(name)


def test_commands_run_from_the_command_line(durable_server: Any) -> None:
    """All options arrive, and only the key goes to stdout."""
    env = os.environ | {"FUSEQUEUE_REDIS_URL": durable_server.url}

    def fusequeue(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "cli.main", *arguments]
        return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=60)

    options = ("--tenant", "acme", "--scopes", "admin", "--name", "a b", "--expires", "1h")
    made = fusequeue("keys", "create", *options)
    assert re.fullmatch(r"fq_[0-9A-Za-z]{48}\n", made.stdout), made.stderr
    limited = fusequeue("tenants", "limit", "acme", "--running-slots", "4", "--json")
    assert json.loads(limited.stdout)["running_slots"] == 4
    assert fusequeue("keys", "revoke", made.stdout.strip()).returncode == 0
    row = json.loads(fusequeue("keys", "list", "--tenant", "acme", "--json").stdout)
    assert (row["scopes"], row["name"], row["state"]) == (["admin"], "a b", "revoked")


def test_keys_are_created_listed_and_revoked(command: Command) -> None:
    """Only the key goes to stdout, once; lists do not show it."""
    created = command("keys", "create", "--tenant", "acme", "--name", "laptop", "--expires", "90d")
    token = created.out.strip()
    assert re.fullmatch(r"fq_[0-9A-Za-z]{48}", token)
    assert "shown this once" in created.err
    listed = command("keys", "--json")
    row = json.loads(listed.out)
    assert (row["prefix"], row["tenant"], row["name"], row["state"]) == (token[:13], "acme", "laptop", "active")
    assert row["scopes"] == ["jobs:read", "jobs:write"]
    assert row["expires_at"] > row["created_at"]
    assert row["last_used_at"] is None
    command("keys", "create", "--tenant", "other")
    assert [json.loads(line)["tenant"] for line in command("keys", "--json").out.splitlines()] == ["acme", "other"]
    table = command("keys", "--tenant", "acme")
    assert token[:13] in table.out
    assert token[13:] not in table.out + listed.out
    assert command("keys", "--tenant", "third").out == "none\n"
    assert command("keys", "revoke", token[:13]).status == 0
    assert json.loads(command("keys", "--tenant", "acme", "--json").out)["state"] == "revoked"


def test_quiet_prints_only_the_key(command: Command) -> None:
    """A terminal of a container has one stream: what Prometheus reads as its token must be only the token."""
    created = command("keys", "create", "--scopes", "metrics", "--quiet")
    assert re.fullmatch(r"fq_[0-9A-Za-z]{48}\n", created.out)
    assert created.err == ""
    both = command("keys", "create", "--quiet", "--json")
    assert (both.status, both.out) == (2, "")
    assert command("keys", "--json").out.count("\n") == 1, "a refused command creates no key"


def test_a_key_is_printed_although_the_storage_cannot_record_it(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It exists, and is shown only once."""
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    monkeypatch.setenv("FUSEQUEUE_STORAGE_DIR", str(tmp_path / "loop"))
    created = command("keys", "create")
    assert created.status == 0
    assert re.fullmatch(r"fq_[0-9A-Za-z]{48}\n", created.out)
    assert "not recorded in the storage" in created.err


SPENT = ("device_seconds_per_day", "device_seconds_per_month")
FOOTPRINT = ("kept_jobs", "record_bytes", "stored_objects", "stored_bytes")


def test_limits_are_set_and_reset(command: Command) -> None:
    limits = ("--requests-per-minute", "60", "--queued-jobs", "10", "--running-slots", "4")
    assert command("tenants", "limit", "acme", *limits).status == 0
    changed = command("tenants", "limit", "acme", "--queued-jobs", "default", "--json")
    unset = dict.fromkeys((*SPENT, *FOOTPRINT))
    expected = {"requests_per_minute": 60, "queued_jobs": None, "running_slots": 4, **unset}
    assert json.loads(changed.out) == {"tenant": "acme", **expected}
    kept = command("tenants", "limit", "acme", "--kept-jobs", "500", "--stored-bytes", str(10**12))
    assert kept.status == 0
    used = dict.fromkeys((f"{name}_used" for name in (*SPENT, *FOOTPRINT, "running_slots", "device_seconds")), 0)
    expected |= {"kept_jobs": 500, "stored_bytes": 10**12}
    assert json.loads(command("tenants", "--json").out) == {"tenant": "acme", **expected, **used}
    columns = command("tenants").out.split("\n")[0].split()
    limited = {name for name, value in expected.items() if value is not None}
    assert set(columns) == {"tenant", *limited, *used}, "limits that no tenant has are left out"


WRONG = [
    (("keys", "create", "--tenant", "A|b"), 2, "tenant"),
    (("keys", "create", "--scopes", "root"), 2, "jobs:read, jobs:write, metrics, admin"),
    (("keys", "create", "--expires", "soon"), 2, "90d"),
    (("keys", "create", "--expires", "90"), 2, "90d"),
    (("keys", "create", "--name", "x" * 101), 2, "name"),
    (("keys", "revoke", "nothing"), 4, "keys` lists"),
    (("keys", "revoke", "--", "--help"), 4, "keys` lists"),
    (("tenants", "limit", "acme", "--running-slots", "0"), 2, "running_slots"),
    (("tenants", "limit", "acme", "--running-slots=-3"), 2, "running_slots"),
]


@pytest.mark.parametrize(("arguments", "status", "message"), WRONG)
def test_errors_are_printed_in_one_line(
    command: Command, arguments: tuple[str, ...], status: int, message: str
) -> None:
    result = command(*arguments)
    assert (result.status, result.out) == (status, "")
    assert message in result.err
    assert result.err.count("\n") == 1


def test_unreachable_redis_is_reported(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEQUEUE_REDIS_URL", "redis://127.0.0.1:1/0")
    result = command("keys")
    assert (result.status, result.out) == (3, "")
    assert "cannot reach Redis" in result.err
    assert not result.err.endswith(".\n")  # more can follow its sentence


def test_without_a_redis_that_is_named_the_folder_is_the_fault(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a running `up` in another folder, say."""

    def unreachable(_settings: Settings) -> Queue:
        raise RedisUnavailable("cannot reach Redis: nothing listens")

    monkeypatch.setattr(Queue, "connect", unreachable)
    monkeypatch.setenv("FUSEQUEUE_REDIS_URL", "")
    lines = command("keys", "--data-dir", str(tmp_path)).err
    assert f"no `fusequeue up` has run on {tmp_path}: name its --data-dir, or set FUSEQUEUE_REDIS_URL" in lines
    monkeypatch.setenv("FUSEQUEUE_REDIS_URL", "redis://127.0.0.1:1/0")
    assert "has run on" not in command("keys", "--data-dir", str(tmp_path)).err


@pytest.mark.parametrize("url", ["nonsense", "redis://127.0.0.1:9?socket_timeout=x"])
def test_an_invalid_setting_is_named(command: Command, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("FUSEQUEUE_REDIS_URL", url)
    result = command("keys")
    assert (result.status, result.out, result.err.count("\n")) == (2, "", 1)
    assert "FUSEQUEUE_REDIS_URL" in result.err


def test_keys_are_those_of_the_running_up_on_the_folder(
    command: Command, durable_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its port and password change with every start, and its namespace may be set in its shell only."""
    data = tmp_path / "data"
    data.mkdir()
    own = {"FUSEQUEUE_REDIS_URL": durable_server.url, "FUSEQUEUE_NAMESPACE": "mine"}
    own["FUSEQUEUE_STORAGE_DIR"] = str(data / "storage")
    environment.record(data, own, "http://127.0.0.1:8000", own_redis=True)
    for name in environment.RECORDED:
        monkeypatch.setenv(name, "")
    assert command("keys", "create", "--data-dir", str(data)).status == 0
    with Redis.from_url(durable_server.url) as redis:
        assert list(redis.scan_iter(match="*fq:mine*"))
