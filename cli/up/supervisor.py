"""Keeps a set of processes running: starts each, restarts what dies, and stops all in order."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from cli.up.process import BoundedLog, Process

READY_POLL_S = 0.1
WAITING_WORD_S = 10.0

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Part:
    """One process to keep running.

    `ready` is asked again and again with the process until it says yes. Parts of a lower `stop_rank` are stopped
    first, and have `stop_grace_s` to end by themselves. `needs` names a part that must be ready before this one starts.
    """

    name: str
    command: tuple[str, ...]
    ready: Callable[[Process], Awaitable[bool]]
    stop_rank: int
    stop_grace_s: float
    needs: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    orphan_signal: int = signal.SIGKILL


@dataclass(frozen=True)
class RestartBackoff:
    """How restarts are spaced: doubling from `first_s` to `longest_s`, afresh after `steady_s` of good health.

    A part that ends `start_tries` times before it was ready once ends the whole start; None: it is tried for good.
    """

    first_s: float = 0.5
    longest_s: float = 15.0
    steady_s: float = 60.0
    start_tries: int | None = 3

    def pause_s(self, failures: int) -> float:
        """Return the pause before the next start; the first restart is immediate."""
        return 0.0 if failures <= 1 else min(self.longest_s, self.first_s * 2.0 ** min(failures - 2, 30))


class StartFailed(Exception):
    """A part never became ready; the message tells which, and what it said last."""


class PartRunner:
    """Keeps one part running until it is halted."""

    def __init__(
        self, part: Part, *, env: Mapping[str, str], log: BoundedLog, tell: Tell, patience: RestartBackoff
    ) -> None:
        self.part = part
        self.ready = asyncio.Event()
        self._env = {**env, **part.env}
        self._log = log
        self._tell = tell
        self._patience = patience
        self._process: Process | None = None
        self._halting = asyncio.Event()
        self._ended = asyncio.Event()
        self._killing = False
        self._was_ready = False
        self._failures = 0

    @property
    def pid(self) -> int | None:
        """The process that runs now, if any."""
        return None if self._process is None else self._process.pid

    @property
    def failing(self) -> bool:
        """Whether it has ended more than once of late, and is not ready again."""
        return self._failures > 1 and not self.ready.is_set()

    async def run(self, needed: asyncio.Event | None) -> None:
        """Start the part whenever `needed` is set, and again when it dies; returns once halted."""
        try:
            while await self._may_start(needed):
                await self._run_once()
        finally:
            self._ended.set()

    async def halt(self) -> None:
        """Ask the part to end, wait for its grace, and kill it if that was not enough."""
        self._halting.set()
        if self._process is not None:
            self._process.terminate()
        try:
            async with asyncio.timeout(self.part.stop_grace_s):
                await self._ended.wait()
        except TimeoutError:
            self._tell(f"{self.part.name}: did not end within {self.part.stop_grace_s:.0f} s; killed")
            self.kill()
            await self._ended.wait()

    def kill(self) -> None:
        """End the part at once."""
        self._killing = True
        self._halting.set()
        if self._process is not None:
            self._process.kill()

    async def _may_start(self, needed: asyncio.Event | None) -> bool:
        await self._unless_halted(asyncio.sleep(self._patience.pause_s(self._failures)))
        if needed is not None:
            await self._unless_halted(needed.wait())
        return not self._halting.is_set()

    async def _run_once(self) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        self._process = process = await Process.start(
            self.part.command, env=self._env, log=self._log, orphan_signal=self.part.orphan_signal
        )
        if self._halting.is_set():
            # It was told while the process was being made, and reached none.
            process.kill() if self._killing else process.terminate()
        watching = asyncio.create_task(self._watch(process, started))
        try:
            status = await process.wait()
        except asyncio.CancelledError:
            process.kill()
            raise
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            self.ready.clear()
            self._process = None
        if not self._halting.is_set():
            self._judge(status, lived_s=loop.time() - started)

    async def _watch(self, process: Process, started: float) -> None:
        while not await self.part.ready(process):  # noqa: ASYNC110 - it is another process; nothing sets an event here
            await asyncio.sleep(READY_POLL_S)
        self._tell(f"{self.part.name}: ready after {asyncio.get_running_loop().time() - started:.1f} s")
        self._was_ready = True
        self.ready.set()

    def _judge(self, status: int, lived_s: float) -> None:
        self._failures = 1 if lived_s > self._patience.steady_s else self._failures + 1
        last_words = "\n".join(f"    {line}" for line in self._log.tail())
        told = f"{self.part.name}: ended with {_status(status)}; {self._log.path} ends:\n{last_words}"
        tries = self._patience.start_tries
        if tries is not None and not self._was_ready and self._failures >= tries:
            raise StartFailed(f"{told}\n{self.part.name}: ended {self._failures} times before it was ready")
        pause_s = self._patience.pause_s(self._failures)
        self._tell(f"{told}\n{self.part.name}: starting again" + (f" in {pause_s:.1f} s" if pause_s else ""))

    async def _unless_halted(self, waiting: Awaitable[object]) -> None:
        tasks = {asyncio.ensure_future(waiting), asyncio.ensure_future(self._halting.wait())}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class Supervisor:
    """Runs parts together. `stop` once drains and ends them in order; `stop` again kills what is left."""

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        env: Mapping[str, str],
        log_dir: Path,
        tell: Tell,
        patience: RestartBackoff = RestartBackoff(),
    ) -> None:
        self._tell = tell
        self._log_dir = log_dir
        self._logs = [BoundedLog(log_dir / f"{part.name}.log") for part in parts]
        self._keepers = {
            part.name: PartRunner(part, env=env, log=log, tell=tell, patience=patience)
            for part, log in zip(parts, self._logs, strict=True)
        }
        self._stopping = asyncio.Event()
        self._killing = False

    def stop(self) -> None:
        """Begin to stop; asked again, kill."""
        if self._stopping.is_set():
            self._killing = True
            for keeper in self._keepers.values():
                keeper.kill()
        self._stopping.set()

    async def run(self, on_ready: Callable[[], None]) -> None:
        """Start all, call `on_ready` once every part is, and return when all are stopped; raises `GaveUp`."""
        running = [asyncio.create_task(keeper.run(self._needed(keeper))) for keeper in self._keepers.values()]
        greeting = asyncio.create_task(self._greet(on_ready))
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({*running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            greeting.cancel()
            stopping.cancel()
            await self._halt_all()
            # A part that gave up raises here, after all others have ended.
            outcomes = await asyncio.gather(*running, greeting, stopping, return_exceptions=True)
            for log in self._logs:
                log.close()
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    def _needed(self, keeper: PartRunner) -> asyncio.Event | None:
        return None if keeper.part.needs is None else self._keepers[keeper.part.needs].ready

    async def _greet(self, on_ready: Callable[[], None]) -> None:
        while waiting := self._unready():
            try:
                async with asyncio.timeout(WAITING_WORD_S):
                    for keeper in waiting:
                        await keeper.ready.wait()
            except TimeoutError:
                late = ", ".join(keeper.part.name for keeper in self._unready())
                self._tell(f"still starting: {late}; logs are in {self._log_dir}")
        on_ready()

    def _unready(self) -> list[PartRunner]:
        return [keeper for keeper in self._keepers.values() if not keeper.ready.is_set()]

    async def _halt_all(self) -> None:
        keepers = sorted(self._keepers.values(), key=lambda keeper: keeper.part.stop_rank)
        for _, rank in groupby(keepers, key=lambda keeper: keeper.part.stop_rank):
            together = list(rank)
            if not self._killing:
                self._tell(f"stopping {', '.join(keeper.part.name for keeper in together)}")
            await asyncio.gather(*(keeper.halt() for keeper in together))


def _status(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
