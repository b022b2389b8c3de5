"""Keeps the cores on which engines compute free of the other processes of `fusequeue up`.

Where no core is idle, Linux wakes a process on the core of the process that wakes it. So API, worker and Redis gather
on the core of the engine, which then waits for them, while another program has its core for itself. Only on Linux can a
process learn where a thread runs, and change that; elsewhere nothing is moved.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

PERIOD_S = 0.5  # a look takes 2 to 3 ms of CPU
BUSY_SHARE = 1 / 3  # of a core, from which a thread of an engine computes
ENGINE = b"worker.engine."  # in the command line of processes that compute
PROC = Path("/proc")

Cores = frozenset[int]


class Thread(NamedTuple):
    """A thread's CPU time so far, in clock ticks, and the core on which it ran last."""

    ticks: int
    core: int


def cores_of_others(available: Cores, computing: Collection[int], least: int) -> Cores:
    """Return the cores for what is no engine: those on which none computes, or all if these are fewer than `least`."""
    free = available.difference(computing)
    return free if len(free) >= least else available


async def keep_free(pids: Callable[[], Iterable[int]], least: int) -> None:
    """Move processes away from the cores of engines until canceled; `least` cores remain for them.

    `pids` returns the processes of `up`, which are looked at with their descendants.
    """
    if sys.platform == "linux":
        placement = Placement(frozenset(os.sched_getaffinity(0)), least)
        while True:
            await asyncio.sleep(PERIOD_S)
            placement.update(pids())


class Placement:
    """Which cores processes may use now."""

    def __init__(self, available: Cores, least: int) -> None:
        self._available = available
        self._least = least
        self._ticks: dict[int, int] = {}  # of the threads of engines at the last update
        self._allowed: dict[int, Cores] = {}  # by process

    def update(self, pids: Iterable[int]) -> None:
        """Look where engines compute, and set the cores of each process."""
        running = {pid: ENGINE in _command(pid) for root in pids for pid in _with_descendants(root)}
        computing = self._computing([pid for pid, engine in running.items() if engine])
        others = cores_of_others(self._available, computing, self._least)
        for pid, engine in running.items():
            # An engine inherits the cores of the worker that starts it.
            self._allow(pid, self._available if engine else others)
        self._allowed = {pid: cores for pid, cores in self._allowed.items() if pid in running}

    def _computing(self, engines: Iterable[int]) -> set[int]:
        before, now = self._ticks, {thread: one for pid in engines for thread, one in _threads(pid)}
        self._ticks = {thread: one.ticks for thread, one in now.items()}
        busy_ticks = BUSY_SHARE * PERIOD_S * os.sysconf("SC_CLK_TCK")
        return {one.core for thread, one in now.items() if one.ticks - before.get(thread, one.ticks) >= busy_ticks}

    def _allow(self, pid: int, cores: Cores) -> None:
        if self._allowed.get(pid) == cores:
            return
        self._allowed[pid] = cores
        for thread in _thread_ids(pid):  # those that start later inherit it
            with suppress(OSError):
                os.sched_setaffinity(thread, cores)


def _with_descendants(pid: int) -> Iterator[int]:
    yield pid
    for thread in _thread_ids(pid):
        with suppress(OSError):
            for child in (PROC / f"{pid}/task/{thread}/children").read_bytes().split():
                yield from _with_descendants(int(child))


def _thread_ids(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(PROC / f"{pid}/task")]
    except OSError:  # it has ended
        return []


def _threads(pid: int) -> Iterator[tuple[int, Thread]]:
    for thread in _thread_ids(pid):
        with suppress(OSError):
            # The fields of proc_pid_stat(5) from the third on: 14 and 15 are CPU time, 39 is the core.
            fields = (PROC / f"{pid}/task/{thread}/stat").read_bytes().rpartition(b")")[2].split()
            yield thread, Thread(int(fields[11]) + int(fields[12]), int(fields[36]))


def _command(pid: int) -> bytes:
    try:
        return (PROC / f"{pid}/cmdline").read_bytes()
    except OSError:
        return b""
