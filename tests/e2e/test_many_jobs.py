"""Many queued jobs are changed at once, over HTTP and by command: all of them, quickly, and Redis serves others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest
import redis
from e2e.conftest import ROOT, Stack

JOBS = int(os.environ.get("CANCELED_JOBS", "10000"))
"""`CANCELED_JOBS=100000` is the long form."""

LINES = 1000
LONGEST_SCRIPT = 500
CONTROL_S = 1.0


@pytest.fixture
def full(make_stack: Callable[..., Stack]) -> Stack:
    """A service without workers, with many queued jobs of one tenant."""
    limits = dict.fromkeys(("max_queued_jobs", "max_queued_jobs_per_tenant", "max_kept_jobs_per_tenant"), "1000000")
    stack = make_stack(**limits, max_record_bytes_per_tenant=str(10**10)).start(workers=0)
    for first in range(0, JOBS, LINES):
        rows = [{"model": "demo", "prompt": "x", "seed": seed} for seed in range(first, min(JOBS, first + LINES))]
        body = "\n".join(map(json.dumps, rows))
        stack.client.post("/v1/jobs:bulk", content=body, headers={"Content-Type": "application/x-ndjson"})
    return stack


class ScriptSizes:
    """Counts the commands of each script that Redis runs, with MONITOR: a script delays the commands of all clients.

    It measures no time, which depends on the machine: 225 commands take Redis 2 ms on two cores of an Intel Xeon.
    """

    def __init__(self, port: int) -> None:
        self._redis = redis.Redis(port=port, socket_timeout=60)
        self._monitor = redis.client.Monitor(self._redis.connection_pool)
        self._last = uuid.uuid4().hex
        self._counts: list[int] = []
        self._complete = False
        self._thread = threading.Thread(target=self._count)

    def __enter__(self) -> ScriptSizes:
        self._monitor.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._redis.echo(self._last)
        self._thread.join(60)
        self._monitor.__exit__()
        self._redis.close()

    def _count(self) -> None:
        while True:
            line = self._monitor.connection.read_response()
            if b" lua] " in line:
                self._counts[-1] += 1
            elif b'] "EVALSHA" ' in line or b'] "EVAL" ' in line:
                self._counts.append(0)
            elif self._last.encode() in line:
                self._complete = True
                return

    @property
    def longest(self) -> int:
        """Return the commands of the longest script, once the `with` block has ended."""
        assert self._complete, "MONITOR ended early"
        return max(self._counts)


def pieces(stack: Stack, path: str, **options: Any) -> list[str]:
    """Repeat a change until it has handled all jobs, and return their ids."""
    ids: list[str] = []
    params = {"status": "queued"}
    while True:
        response = stack.client.post(path, params=params, **options)
        assert response.status_code == 200, response.text
        piece = response.json()
        ids += piece["ids"]
        if not piece["has_more"]:
            return ids
        params["after"] = piece["next_cursor"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_all_queued_jobs_are_canceled_and_redis_serves_others(full: Stack) -> None:
    """Each ends once; the long form takes less than a minute where no other program needs the cores."""
    started = time.monotonic()
    with ScriptSizes(full.redis_port) as scripts:
        canceled = pieces(full, "/v1/jobs:cancel")
    print(f"{JOBS} jobs canceled in {time.monotonic() - started:.1f} s; longest script: {scripts.longest} commands")
    assert scripts.longest < LONGEST_SCRIPT
    assert len(canceled) == len(set(canceled)) == JOBS
    assert full.read("/v1/queues")["data"] == []
    assert full.read("/v1/jobs", status="queued,running")["data"] == []
    assert full.terminal_events() == dict.fromkeys(canceled, 1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_controls_take_effect_at_once_among_many_queued_jobs(full: Stack) -> None:
    """Over HTTP and by command."""
    jobs = [full.submit(prompt=f"urgent {number}") for number in range(3)]
    with ScriptSizes(full.redis_port) as scripts:
        change_over_http(full, jobs)
        dry = command(full, "update", "--status", "queued", "--priority", "bulk", "--dry-run")
        updated = command(full, "update", "--status", "queued", "--priority", "bulk")
    print(f"longest script: {scripts.longest} commands")
    assert scripts.longest < LONGEST_SCRIPT
    assert dry["ids"] == updated["ids"]
    assert len(updated["ids"]) == JOBS
    (depth,) = full.read("/v1/queues")["data"]
    assert depth["jobs"] == {"interactive": 0, "standard": 0, "bulk": JOBS + len(jobs)}
    ended = command(full, "cancel", "--model", "demo", "--status", "queued")
    assert len(ended["ids"]) == JOBS + len(jobs)
    assert command(full, "delete", "--status", "canceled", "--dry-run")["ids"] != []


def change_over_http(stack: Stack, job_ids: list[str]) -> None:
    """Change each job in three ways; of each, the fastest counts, since the machine has other work."""
    client = stack.client
    assert best_s(lambda one: client.patch(f"/v1/jobs/{one}", json={"priority": "bulk"}), job_ids) < CONTROL_S
    assert {stack.job(one)["priority"] for one in job_ids} == {"bulk"}
    assert best_s(lambda one: client.post(f"/v1/jobs/{one}/cancel"), job_ids) < CONTROL_S
    assert best_s(lambda one: client.post(f"/v1/jobs/{one}/retry"), job_ids) < CONTROL_S


def best_s(change: Callable[[str], Any], job_ids: list[str]) -> float:
    times = []
    for job_id in job_ids:
        started = time.monotonic()
        assert change(job_id).is_success
        times.append(time.monotonic() - started)
    return min(times)


def command(stack: Stack, *arguments: str) -> dict[str, Any]:
    """Run the command `fusequeue`, and return the object that it prints."""
    run = [sys.executable, "-m", "cli.main", *arguments, "--url", stack.url, "--json"]
    done = subprocess.run(run, cwd=ROOT, env=stack.env, capture_output=True, text=True, timeout=600, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found
