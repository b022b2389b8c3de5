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

from cli.keys import point_at
from cli.up.redis_server import RedisServer, configure
from shared.keyring import main as keyring_main

ROOT = Path(__file__).resolve().parents[3]
Command = Callable[..., "Told"]


class Told(NamedTuple):
    """What a command answered."""

    status: int
    out: str
    err: str


@pytest.fixture
def keyring(
    redis_server: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Command]:
    """The program that `fusequeue keys` becomes, on a namespace of its own."""
    namespace = f"t{os.urandom(6).hex()}"
    monkeypatch.setenv("FUSEQUEUE_REDIS_URL", redis_server.url)
    monkeypatch.setenv("FUSEQUEUE_NAMESPACE", namespace)

    def run(*words: str) -> Told:
        status = keyring_main(words)
        return Told(status, *capsys.readouterr())

    yield run
    with Redis.from_url(redis_server.url) as redis:
        for name in redis.scan_iter(match=f"*fq:{namespace}*"):
            redis.delete(name)


def test_the_command_line_becomes_that_program(durable_server: Any) -> None:
    """All options of the command arrive, and the key alone goes to stdout."""
    env = os.environ | {"FUSEQUEUE_REDIS_URL": durable_server.url, "PYTHONPATH": str(ROOT)}

    def fusequeue(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "cli.main", *words]
        return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=60)

    options = ("--tenant", "acme", "--scopes", "admin", "--name", "a b", "--expires", "1h")
    made = fusequeue("keys", "create", *options)
    assert re.fullmatch(r"fq_[0-9A-Za-z]{48}\n", made.stdout), made.stderr
    limited = fusequeue("tenants", "limit", "acme", "--running-slots", "4", "--json")
    assert json.loads(limited.stdout)["running_slots"] == 4
    assert fusequeue("keys", "revoke", made.stdout.strip()).returncode == 0
    (row,) = json.loads(fusequeue("keys", "list", "--tenant", "acme", "--json").stdout)
    assert (row["scopes"], row["name"], row["state"]) == (["admin"], "a b", "revoked")


def test_a_key_is_made_listed_and_revoked(keyring: Command) -> None:
    """The key alone goes to stdout, once; lists never show it."""
    made = keyring("create", "--tenant", "acme", "--name", "laptop", "--expires", "90d")
    token = made.out.strip()
    assert re.fullmatch(r"fq_[0-9A-Za-z]{48}", token)
    assert "shown this once" in made.err
    listed = keyring("--json", "list")
    (row,) = json.loads(listed.out)
    assert (row["prefix"], row["tenant"], row["name"], row["state"]) == (token[:13], "acme", "laptop", "active")
    assert row["scopes"] == ["jobs:read", "jobs:write"]
    assert row["expires_at"] > row["created_at"]
    assert row["last_used_at"] is None
    table = keyring("list", "--tenant", "acme")
    assert token[:13] in table.out
    assert token[13:] not in table.out + listed.out
    assert keyring("list", "--tenant", "other").out == "none\n"
    assert keyring("revoke", token[:13]).status == 0
    assert json.loads(keyring("--json", "list").out)[0]["state"] == "revoked"


def test_limits_are_set_and_given_back_to_the_settings(keyring: Command) -> None:
    set_to = ("--requests-per-minute", "60", "--queued-jobs", "10", "--running-slots", "4")
    assert keyring("limit", "acme", *set_to).status == 0
    changed = keyring("--json", "limit", "acme", "--queued-jobs", "default")
    expected = {"tenant": "acme", "requests_per_minute": 60, "queued_jobs": None, "running_slots": 4}
    assert json.loads(changed.out) == expected
    assert json.loads(keyring("--json", "tenants").out) == [expected]


WRONG = [
    (("create", "--tenant", "A|b"), 2, "tenant"),
    (("create", "--scopes", "root"), 2, "jobs:read, jobs:write, admin"),
    (("create", "--expires", "soon"), 2, "90d"),
    (("create", "--name", "x" * 101), 2, "name"),
    (("revoke", "nothing"), 1, "keys list"),
    (("revoke", "--", "--help"), 1, "keys list"),
    (("limit", "acme", "--running-slots", "0"), 2, "running_slots"),
    (("limit", "acme", "--running-slots=-3"), 2, "running_slots"),
]


@pytest.mark.parametrize(("words", "status", "told"), WRONG)
def test_what_cannot_be_done_is_told_in_one_line(
    keyring: Command, words: tuple[str, ...], status: int, told: str
) -> None:
    answer = keyring(*words)
    assert (answer.status, answer.out) == (status, "")
    assert told in answer.err
    assert answer.err.count("\n") == 1


def test_without_redis_it_says_so(keyring: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEQUEUE_REDIS_URL", "redis://127.0.0.1:1/0")
    answer = keyring("list")
    assert (answer.status, answer.out) == (1, "")
    assert "Redis does not serve" in answer.err


def test_the_redis_of_a_running_up_is_found_by_its_folder(tmp_path: Path) -> None:
    """Its port and password are new at every start; the environment goes before it."""
    environ: dict[str, str] = {}
    point_at(tmp_path, environ)
    assert environ == {}
    configure(RedisServer(Path("/bin/redis-server"), (7, 0, 1)), tmp_path / "redis", 6391, "secret")
    point_at(tmp_path, environ)
    assert environ == {"FUSEQUEUE_REDIS_URL": "redis://:secret@127.0.0.1:6391/0"}
    environ["FUSEQUEUE_REDIS_URL"] = "redis://elsewhere"
    point_at(tmp_path, environ)
    assert environ["FUSEQUEUE_REDIS_URL"] == "redis://elsewhere"
