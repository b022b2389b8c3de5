"""Pool processes, here small scripts: restarted when they end, removed when drained."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from cli.pool.pool import PoolProcesses, WorkerState

GRACEFUL = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("worker_ready", os.getpid(), os.environ.get("GPU"), flush=True)
while True:
    time.sleep(600)
"""
BROKEN = "raise SystemExit('no such device')"


class PoolHarness:
    """Pool processes and their status messages."""

    def __init__(self, folder: Path, code: str) -> None:
        self.folder = folder
        self.messages: list[str] = []
        workers_env = ({"GPU": "a"}, {"GPU": "b"})
        command = (sys.executable, "-c", code)
        self.processes = PoolProcesses(
            workers_env, os.environ, folder, self.messages.append, grace_s=20.0, command=command
        )

    def states(self) -> dict[int, WorkerState]:
        return {worker.index: worker.state for worker in self.processes.workers({})}

    def log_lines(self, index: int) -> list[list[str]]:
        log = self.folder / f"worker-{index + 1}.log"
        return [line.split() for line in log.read_text().splitlines()] if log.exists() else []

    async def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline, f"timeout waiting until {what}: {self.messages}"
            await asyncio.sleep(0.01)


@pytest.fixture
async def make_harness(tmp_path: Path) -> AsyncIterator[Callable[[str], PoolHarness]]:
    harnesses: list[PoolHarness] = []

    def make(code: str) -> PoolHarness:
        harnesses.append(PoolHarness(tmp_path, code))
        return harnesses[-1]

    yield make
    for harness in harnesses:
        await harness.processes.finish()


async def test_each_index_has_its_gpu_and_is_free_once_its_worker_is_drained(
    make_harness: Callable[[str], PoolHarness],
) -> None:
    harness = make_harness(GRACEFUL)
    harness.processes.start(0)
    harness.processes.start(1)
    await harness.until(lambda: harness.states() == {0: "ready", 1: "ready"}, "both are ready")
    assert [harness.log_lines(index)[0][2] for index in (0, 1)] == ["a", "b"]
    harness.processes.drain(0)
    assert harness.states()[0] == "draining"
    await harness.until(lambda: harness.states() == {1: "ready"}, "the index is free")
    assert harness.messages[-1].startswith("worker-"), "a graceful exit prints no message"


async def test_a_killed_worker_is_restarted_and_its_pid_still_counts_as_ours(
    make_harness: Callable[[str], PoolHarness],
) -> None:
    harness = make_harness(GRACEFUL)
    harness.processes.start(0)
    await harness.until(lambda: harness.states() == {0: "ready"}, "it is ready")
    pid = int(harness.log_lines(0)[0][1])
    assert harness.processes.is_ours(pid)
    os.kill(pid, signal.SIGKILL)
    await harness.until(lambda: len(harness.log_lines(0)) == 2 and harness.states() == {0: "ready"}, "it is restarted")
    assert harness.processes.is_ours(pid)
    assert not harness.processes.is_ours(os.getpid())


async def test_a_worker_that_cannot_start_is_restarted_with_delays_and_drained_at_once(
    make_harness: Callable[[str], PoolHarness],
) -> None:
    harness = make_harness(BROKEN)
    harness.processes.start(0)
    await harness.until(lambda: any("restarting in" in message for message in harness.messages), "a delay is printed")
    assert harness.states() == {0: "failing"}
    assert any("no such device" in message for message in harness.messages)
    harness.processes.drain(0)
    await harness.until(lambda: harness.states() == {}, "it has exited")
