"""Cores on which engines compute, and the processes that make room there."""

import asyncio
import os
import subprocess
import sys

import pytest

from cli.up import cores

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says on which core a thread runs")

BUSY = "import time\nwhile True: pass"
IDLE = "import time; time.sleep(600)"


@pytest.mark.parametrize(
    ("available", "computing", "least", "expected"),
    [
        ({0, 1}, set(), 1, {0, 1}),
        ({0, 1}, {1}, 1, {0}),
        ({0, 1}, {0, 1}, 1, {0, 1}),
        ({0}, {0}, 1, {0}),
        ({0, 1, 2, 3}, {1, 2}, 2, {0, 3}),
        ({0, 1, 2, 3}, {1, 2}, 3, {0, 1, 2, 3}),
        ({2, 3}, {7}, 1, {2, 3}),
    ],
)
def test_others_get_the_cores_without_an_engine_if_these_are_enough(available, computing, least, expected):
    assert cores.cores_of_others(frozenset(available), computing, least) == expected


@pytest.fixture
def start():
    started = []

    def run(code: str, *arguments: str) -> subprocess.Popen:
        started.append(subprocess.Popen([sys.executable, "-c", code, *arguments]))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.05)


async def test_a_process_leaves_the_core_of_a_busy_engine_and_may_return(start, monkeypatch):
    """The engine itself may use all cores, also when it inherited fewer from the worker that started it."""
    monkeypatch.setattr(cores, "BUSY_SHARE", 0.05)  # other processes can have most of the core
    available = os.sched_getaffinity(0)
    if len(available) < 2:
        pytest.skip("the test needs two cores")
    other, engine = start(IDLE), start(BUSY, "worker.engine.process")
    os.sched_setaffinity(engine.pid, {min(available)})
    keeping = asyncio.create_task(cores.keep_free(lambda: [other.pid, engine.pid], least=1))
    try:
        await until(lambda: os.sched_getaffinity(engine.pid) == available)
        await until(lambda: os.sched_getaffinity(other.pid) < available)
        engine.kill()
        await until(lambda: os.sched_getaffinity(other.pid) == available)
    finally:
        keeping.cancel()


async def test_an_idle_engine_and_a_busy_process_that_is_no_engine_move_no_process(start):
    other, _, busy = start(IDLE), start(IDLE, "worker.engine.process"), start(BUSY, "worker")
    placement = cores.Placement(frozenset(os.sched_getaffinity(0)), least=1)
    for _ in range(4):
        placement.update([other.pid, busy.pid, os.getpid()])
        assert os.sched_getaffinity(other.pid) == os.sched_getaffinity(0)
        await asyncio.sleep(cores.PERIOD_S)


def test_a_process_that_has_ended_is_ignored(start):
    ended = start("pass")
    ended.wait(timeout=30)
    cores.Placement(frozenset(os.sched_getaffinity(0)), least=1).update([ended.pid])
