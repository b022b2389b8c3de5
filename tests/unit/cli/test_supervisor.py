"""Supervision with parts that are small scripts: starting, restarting, giving up, and stopping in order."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.up.process import Process
from cli.up.supervisor import Part, RestartBackoff, StartFailed, Supervisor

QUICK = RestartBackoff(first_s=0.01, longest_s=0.05, steady_s=60.0, start_tries=3)
# Says that it is there, and when it was told to end, in the order in which that happened.
POLITE = """
import signal, sys, time
def end(*_):
    with open({journal!r}, "a") as journal:
        print({name!r}, file=journal)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("up", flush=True)
while True:
    time.sleep(600)
"""
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"


async def says_up(process: Process) -> bool:
    return "up" in process.log.tail()


class Stage:
    """A supervisor under test, the words it tells, and the processes its parts had."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.told: list[str] = []
        self.pids: dict[str, list[int]] = {}
        self.ready = asyncio.Event()
        self.supervisor: Supervisor

    def part(self, name: str, code: str | None = None, *, rank: int = 0, grace_s: float = 20.0, **more) -> Part:
        code = POLITE.format(journal=str(self.folder / "journal"), name=name) if code is None else code

        async def ready(process: Process) -> bool:
            pids = self.pids.setdefault(name, [])
            if process.pid not in pids:
                pids.append(process.pid)
            return await says_up(process)

        command = (sys.executable, "-c", code)
        return Part(name, command, ready, stop_rank=rank, stop_grace_s=grace_s, **more)

    def start(self, *parts: Part) -> asyncio.Task[None]:
        self.supervisor = Supervisor(
            parts, env=os.environ, log_dir=self.folder / "logs", tell=self.told.append, patience=QUICK
        )
        return asyncio.create_task(self.supervisor.run(self.ready.set))

    async def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, f"waited in vain until {what}: {self.told}"
            await asyncio.sleep(0.01)


@pytest.fixture
def stage(tmp_path):
    return Stage(tmp_path)


async def test_parts_stop_in_the_order_of_their_rank(stage):
    """Workers drain while the API and Redis still serve them; Redis ends last."""
    running = stage.start(stage.part("redis", rank=2), stage.part("api", rank=1), stage.part("worker", rank=0))
    async with asyncio.timeout(60):
        await stage.ready.wait()
        stage.supervisor.stop()
        await running
    assert (stage.folder / "journal").read_text().split() == ["worker", "api", "redis"]


async def test_a_part_that_was_killed_comes_back(stage):
    """A part that dies is started again, and the one beside it does not notice."""
    running = stage.start(stage.part("a"), stage.part("b"))
    async with asyncio.timeout(60):
        await stage.ready.wait()
        os.kill(stage.pids["a"][0], signal.SIGKILL)
        await stage.until(lambda: len(stage.pids["a"]) == 2, "a is back")
        stage.supervisor.stop()
        await running
    assert len(stage.pids["b"]) == 1
    assert any("SIGKILL" in line for line in stage.told)


async def test_a_part_is_not_ready_by_its_predecessors_words(stage):
    """What the process before said is forgotten: the next one has to get ready itself."""
    flag = stage.folder / "mute"
    code = f"import pathlib, time; pathlib.Path({str(flag)!r}).exists() or print('up', flush=True); time.sleep(600)"
    running = stage.start(stage.part("a", code))
    async with asyncio.timeout(60):
        await stage.ready.wait()
        flag.touch()
        os.kill(stage.pids["a"][0], signal.SIGKILL)
        await stage.until(lambda: len(stage.pids["a"]) == 2, "a is back")
        await asyncio.sleep(0.2)
        stage.supervisor.stop()
        await running
    assert sum("ready after" in line for line in stage.told) == 1


async def test_a_part_waits_for_the_one_it_needs(stage):
    """Nothing is started before what it needs is ready, at the start and after a loss."""
    slow = "import time; time.sleep(0.2); print('up', flush=True); time.sleep(600)"
    running = stage.start(stage.part("api", needs="redis"), stage.part("redis", slow, rank=1))
    async with asyncio.timeout(60):
        await stage.ready.wait()
        stage.supervisor.stop()
        await running
    order = [line.split(":")[0] for line in stage.told if "ready after" in line]
    assert order == ["redis", "api"]


async def test_a_part_that_never_gets_ready_ends_the_start(stage):
    """After a few tries the start is given up with the part's last words, and the others are stopped."""
    running = stage.start(stage.part("good"), stage.part("bad", "import sys; sys.exit('no models file')"))
    async with asyncio.timeout(60):
        with pytest.raises(StartFailed, match="no models file"):
            await running
    assert sum("starting again" in line for line in stage.told) == QUICK.start_tries - 1
    assert not stage.ready.is_set()


async def test_a_part_that_does_not_end_is_killed_after_its_grace(stage):
    """A hung part holds the end up for its grace and no longer."""
    running = stage.start(stage.part("stubborn", STUBBORN, grace_s=0.1))
    async with asyncio.timeout(60):
        await stage.ready.wait()
        stage.supervisor.stop()
        await running
    assert any("killed" in line for line in stage.told)


async def test_a_second_stop_kills(stage):
    """Whoever presses Ctrl-C twice does not wait for the grace."""
    running = stage.start(stage.part("stubborn", STUBBORN, grace_s=600))
    async with asyncio.timeout(60):
        await stage.ready.wait()
        stage.supervisor.stop()
        stage.supervisor.stop()
        await running


async def test_a_stop_during_the_start_is_heeded(stage):
    """Parts that wait for another, or for their next try, end as well."""
    silent = "import time; time.sleep(600)"
    running = stage.start(stage.part("redis", silent, rank=1), stage.part("api", needs="redis"))
    async with asyncio.timeout(60):
        await stage.until(lambda: "redis" in stage.pids, "redis is started")
        stage.supervisor.stop()
        await running
    assert "api" not in stage.pids
    assert not stage.ready.is_set()


@pytest.mark.parametrize(
    ("failures", "pause_s"),
    [(0, 0.0), (1, 0.0), (2, 0.5), (3, 1.0), (4, 2.0), (20, 15.0), (10_000, 15.0)],
)
def test_pauses_grow_to_a_bound(failures, pause_s):
    """The first restart is immediate; a part that keeps dying is tried at a steady, slow pace."""
    assert RestartBackoff().pause_s(failures) == pause_s
