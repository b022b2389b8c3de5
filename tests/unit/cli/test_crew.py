"""The workers of a pool as processes, here small scripts: restarted when they die, gone when they are drained."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from cli.pool.decisions import State
from cli.pool.processes import PoolProcesses

POLITE = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("worker_ready", os.getpid(), os.environ.get("GPU"), flush=True)
while True:
    time.sleep(600)
"""
BROKEN = "raise SystemExit('no such device')"


class Stage:
    """A crew under test, and what it told."""

    def __init__(self, folder: Path, code: str) -> None:
        self.folder = folder
        self.told: list[str] = []
        own = ({"GPU": "a"}, {"GPU": "b"})
        command = (sys.executable, "-c", code)
        self.crew = PoolProcesses(own, os.environ, folder, self.told.append, grace_s=20.0, command=command)

    def states(self) -> dict[int, State]:
        return {member.slot: member.state for member in self.crew.members({})}

    def said(self, slot: int) -> list[list[str]]:
        log = self.folder / f"worker-{slot + 1}.log"
        return [line.split() for line in log.read_text().splitlines()] if log.exists() else []

    async def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline, f"waited in vain until {what}: {self.told}"
            await asyncio.sleep(0.01)


@pytest.fixture
async def make_stage(tmp_path: Path) -> AsyncIterator[Callable[[str], Stage]]:
    made: list[Stage] = []

    def make(code: str) -> Stage:
        made.append(Stage(tmp_path, code))
        return made[-1]

    yield make
    for stage in made:
        await stage.crew.finish()


async def test_each_slot_has_its_own_gpu_and_is_free_once_its_worker_has_left(
    make_stage: Callable[[str], Stage],
) -> None:
    stage = make_stage(POLITE)
    stage.crew.start(0)
    stage.crew.start(1)
    await stage.until(lambda: stage.states() == {0: "ready", 1: "ready"}, "both are ready")
    assert [stage.said(slot)[0][2] for slot in (0, 1)] == ["a", "b"]
    stage.crew.drain(0)
    assert stage.states()[0] == "draining"
    await stage.until(lambda: stage.states() == {1: "ready"}, "the slot is free")
    assert stage.told[-1].startswith("worker-"), "it ended by itself: nothing is told of a kill"


async def test_a_worker_that_was_killed_comes_back_and_the_dead_one_is_still_known_as_ours(
    make_stage: Callable[[str], Stage],
) -> None:
    stage = make_stage(POLITE)
    stage.crew.start(0)
    await stage.until(lambda: stage.states() == {0: "ready"}, "it is ready")
    pid = int(stage.said(0)[0][1])
    assert stage.crew.is_ours(pid)
    os.kill(pid, signal.SIGKILL)
    await stage.until(lambda: len(stage.said(0)) == 2 and stage.states() == {0: "ready"}, "it is back")
    assert stage.crew.is_ours(pid)
    assert not stage.crew.is_ours(os.getpid())


async def test_one_that_cannot_start_is_tried_again_after_pauses_and_is_drained_at_once(
    make_stage: Callable[[str], Stage],
) -> None:
    stage = make_stage(BROKEN)
    stage.crew.start(0)
    await stage.until(lambda: any("starting again in" in words for words in stage.told), "a pause is told")
    assert stage.states() == {0: "failing"}
    assert any("no such device" in words for words in stage.told)
    stage.crew.drain(0)
    await stage.until(lambda: stage.states() == {}, "it has left")
