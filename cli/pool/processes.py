"""The worker processes of a pool, each in a slot of its own."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cli.pool.decisions import PoolWorker, State
from cli.up.process import BoundedLog, Process
from cli.up.supervisor import Part, PartRunner, RestartBackoff, Tell

WORKER = (sys.executable, "-P", "-m", "worker")
REMEMBERED = 256  # processes
PATIENCE = RestartBackoff(first_s=1.0, longest_s=60.0, start_tries=None)


@dataclass
class _Hired:
    keeper: PartRunner
    running: asyncio.Task[None]
    log: BoundedLog
    started_s: float
    leaving: asyncio.Task[None] | None = None


class PoolProcesses:
    """Starts and drains workers by slot; `own` is what each slot's worker gets in its environment beside `env`.

    A worker has `grace_s` to leave once it is drained.
    """

    def __init__(
        self,
        own: Sequence[Mapping[str, str]],
        env: Mapping[str, str],
        log_dir: Path,
        tell: Tell,
        grace_s: float,
        command: tuple[str, ...] = WORKER,
    ) -> None:
        self._own = own
        self._env = env
        self._log_dir = log_dir
        self._tell = tell
        self._grace_s = grace_s
        self._command = command
        self._hired: dict[int, _Hired] = {}
        self._pids: deque[int] = deque(maxlen=REMEMBERED)

    @property
    def slots(self) -> int:
        return len(self._own)

    def is_ours(self, pid: int) -> bool:
        """Tell whether a process is, or was lately, a worker of ours: a killed one is still told of for a while."""
        for hired in self._hired.values():
            if hired.keeper.pid is not None and hired.keeper.pid not in self._pids:
                self._pids.append(hired.keeper.pid)
        return pid in self._pids

    def start(self, slot: int) -> None:
        """Start the worker of a free slot; it is started again when it dies, until it is drained."""
        name = f"worker-{slot + 1}"
        part = Part(
            name=name,
            command=self._command,
            ready=_says_ready,
            stop_rank=0,
            stop_grace_s=self._grace_s,
            env=self._own[slot],
            orphan_signal=signal.SIGTERM,  # Redis is still there: they finish what they have
        )
        log = BoundedLog(self._log_dir / f"{name}.log")
        keeper = PartRunner(part, env=self._env, log=log, tell=self._tell, patience=PATIENCE)
        self._hired[slot] = _Hired(keeper, asyncio.create_task(keeper.run(None)), log, time.monotonic())

    def drain(self, slot: int) -> None:
        """Ask a slot's worker to finish what it has and leave."""
        hired = self._hired[slot]
        if hired.leaving is None:
            hired.leaving = asyncio.create_task(hired.keeper.halt())

    def kill(self) -> None:
        """End all at once."""
        for hired in self._hired.values():
            hired.keeper.kill()

    def members(self, running: Mapping[int, int]) -> list[PoolWorker]:
        """Return the workers of the slots; `running` is what each process told of its jobs.

        Slots whose worker has left are free again; an error of one that ended by itself is raised here.
        """
        for slot in [slot for slot, hired in self._hired.items() if _gone(hired)]:
            hired = self._hired.pop(slot)
            hired.log.close()
            hired.running.result()
        return [
            PoolWorker(slot, _state(hired), hired.started_s, running.get(hired.keeper.pid or 0))
            for slot, hired in self._hired.items()
        ]

    async def finish(self) -> None:
        """Drain all, and return when they have left."""
        for slot in self._hired:
            self.drain(slot)
        leaving = [hired.leaving for hired in self._hired.values() if hired.leaving is not None]
        await asyncio.gather(*leaving)
        await asyncio.gather(*(hired.running for hired in self._hired.values()), return_exceptions=True)
        for hired in self._hired.values():
            hired.log.close()
        self._hired.clear()


def _gone(hired: _Hired) -> bool:
    return hired.running.done() and (hired.leaving is None or hired.leaving.done())


def _state(hired: _Hired) -> State:
    if hired.leaving is not None:
        return "draining"
    if hired.keeper.failing:
        return "failing"
    return "ready" if hired.keeper.ready.is_set() else "starting"


async def _says_ready(process: Process) -> bool:
    return process.log.ready
