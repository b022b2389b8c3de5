"""Runs a set of processes: starts each, restarts those that end, and stops all in order."""

import asyncio
import json
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from cli.up.child_process import BoundedLog, Process
from shared.errors import ConfigurationError
from shared.runtime.backoff import backoff_s

READY_POLL_S = 0.1
STARTUP_MESSAGE_S = 10.0  # between messages while processes are still starting

StatusPrinter = Callable[[str], None]


@dataclass(frozen=True)
class ProcessSpec:
    """A process to keep running.

    `ready` is polled until it returns True. Processes of a lower `stop_rank` are stopped first, each with
    `stop_grace_s` to exit. `needs` names a process that must be ready before this one starts. Each start inherits
    `descriptors`; `on_stop` is called before the process is stopped for good.
    """

    name: str
    command: tuple[str, ...]
    ready: Callable[[Process], Awaitable[bool]]
    stop_rank: int
    stop_grace_s: float
    needs: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    orphan_signal: int = signal.SIGKILL
    descriptors: tuple[int, ...] = ()
    on_stop: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class RestartBackoff:
    """Delays between restarts: doubling from `first_s` to `max_s`, reset after a run of `reset_after_s` that was ready.

    A process that ends `start_attempts` times before it was ever ready fails the whole start; None: no limit.
    """

    first_s: float = 0.5
    max_s: float = 15.0
    reset_after_s: float = 60.0
    start_attempts: int | None = 3

    def delay_s(self, failures: int) -> float:
        """Return the delay before the next start; the first restart is immediate."""
        return 0.0 if failures <= 1 else backoff_s(failures - 1, self.first_s, self.max_s)


def configuration_fault(log: Sequence[str]) -> str | None:
    """Return the sentence with which a process has refused its settings, which another start would not change."""
    try:
        entry = json.loads(log[-1])
        return str(entry["error"]) if entry["code"] == ConfigurationError.code else None
    except (ValueError, LookupError, TypeError):
        return None


class StartFailed(Exception):
    """A process never became ready; the message names it and contains the end of its log."""


@dataclass(eq=False)
class ProcessRunner:
    """Keeps one process running until it is stopped; the errors of models that it cannot load are printed."""

    spec: ProcessSpec
    env: Mapping[str, str]
    log_dir: Path
    print_status: StatusPrinter
    backoff: RestartBackoff
    ready: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _log: BoundedLog = field(init=False)
    _process: Process | None = field(default=None, init=False)
    _stopping: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _ended: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _killing: bool = field(default=False, init=False)
    _was_ready: bool = field(default=False, init=False)
    _failures: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        name = self.spec.name
        self._log = BoundedLog(
            self.log_dir / f"{name}.log", on_fault=lambda error: self.print_status(f"{name}: {error}")
        )

    @property
    def pid(self) -> int | None:
        """Id of the current process, if any."""
        return None if self._process is None else self._process.pid

    @property
    def failing(self) -> bool:
        """Whether it has failed more than once in a row and is not ready."""
        return self._failures > 1 and not self.ready.is_set()

    async def run(self, needed: asyncio.Event | None) -> None:
        """Start the process once `needed` is set and restart it when it ends; return after `stop`."""
        try:
            while await self._wait_to_start(needed):
                await self._run_once()
        finally:
            self._log.close()
            self._ended.set()

    async def stop(self) -> None:
        """Terminate the process, and kill it if it does not exit within its grace period."""
        self._stopping.set()
        self.spec.on_stop()
        if self._process is not None:
            self._process.terminate()
        try:
            async with asyncio.timeout(self.spec.stop_grace_s):
                await self._ended.wait()
        except TimeoutError:
            self.print_status(f"{self.spec.name}: killed; it did not exit within {self.spec.stop_grace_s:.0f} s")
            self.kill()
            await self._ended.wait()

    def kill(self) -> None:
        """Kill the process without waiting."""
        self._killing = True
        self._stopping.set()
        if self._process is not None:
            self._process.kill()

    async def _wait_to_start(self, needed: asyncio.Event | None) -> bool:
        """Wait for the restart delay and for `needed`; False when stopped meanwhile."""
        await self._until_stopping(asyncio.sleep(self.backoff.delay_s(self._failures)))
        if needed is not None:
            await self._until_stopping(needed.wait())
        return not self._stopping.is_set()

    async def _run_once(self) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        self._process = process = await Process.start(
            self.spec.command,
            env={**self.env, **self.spec.env},
            log=self._log,
            orphan_signal=self.spec.orphan_signal,
            descriptors=self.spec.descriptors,
        )
        if self._stopping.is_set():
            # `stop` or `kill` was called while the process was being created, and could not signal it.
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
            was_ready = self.ready.is_set()
            self.ready.clear()
            self._process = None
        if not self._stopping.is_set():
            self._on_exit(status, worked=was_ready and loop.time() - started > self.backoff.reset_after_s)

    async def _watch(self, process: Process, started: float) -> None:
        while not await self.spec.ready(process):  # noqa: ASYNC110 - another process; no event to wait for
            await asyncio.sleep(READY_POLL_S)
        self.print_status(f"{self.spec.name}: ready after {asyncio.get_running_loop().time() - started:.1f} s")
        self._was_ready = True
        self.ready.set()

    def _on_exit(self, status: int, worked: bool) -> None:
        self._failures = 1 if worked else self._failures + 1
        tail = "\n".join(f"    {line}" for line in self._log.tail())
        message = f"{self.spec.name}: ended with {_status(status)}; the end of {self._log.path}:\n{tail}"
        attempts = self.backoff.start_attempts
        if attempts is not None and not self._was_ready and (fault := configuration_fault(self._log.tail())):
            raise StartFailed(f"{self.spec.name}: {fault}")
        if attempts is not None and not self._was_ready and self._failures >= attempts:
            raise StartFailed(f"{message}\n{self.spec.name}: ended {self._failures} times before it was ready")
        delay_s = self.backoff.delay_s(self._failures)
        self.print_status(f"{message}\n{self.spec.name}: restarting" + (f" in {delay_s:.1f} s" if delay_s else ""))

    async def _until_stopping(self, waiting: Awaitable[object]) -> None:
        tasks = {asyncio.ensure_future(waiting), asyncio.ensure_future(self._stopping.wait())}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class Supervisor:
    """Runs processes together. The first `stop` terminates them in order, the second kills the rest."""

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        *,
        env: Mapping[str, str],
        log_dir: Path,
        print_status: StatusPrinter,
        backoff: RestartBackoff = RestartBackoff(),
    ) -> None:
        self._print_status = print_status
        self._log_dir = log_dir
        self._runners = {spec.name: ProcessRunner(spec, env, log_dir, print_status, backoff) for spec in specs}
        self._stopping = asyncio.Event()
        self._killing = False

    def pids(self) -> list[int]:
        """Return the ids of the processes that run now."""
        return [runner.pid for runner in self._runners.values() if runner.pid is not None]

    def stop(self) -> None:
        """Begin to stop; a second call kills."""
        if self._stopping.is_set():
            self._killing = True
            for runner in self._runners.values():
                runner.kill()
        self._stopping.set()

    async def run(self, on_ready: Callable[[], None]) -> None:
        """Start all, call `on_ready` once all are ready, and return when all have stopped; raises `StartFailed`."""
        ready: dict[str | None, asyncio.Event | None] = {None: None}
        ready |= {name: runner.ready for name, runner in self._runners.items()}
        running = [asyncio.create_task(runner.run(ready[runner.spec.needs])) for runner in self._runners.values()]
        starting = asyncio.create_task(self._wait_ready(on_ready))
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({*running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            starting.cancel()
            stopping.cancel()
            await self._stop_all()
            # Collects a `StartFailed` after all other processes have ended.
            outcomes = await asyncio.gather(*running, starting, stopping, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    async def _wait_ready(self, on_ready: Callable[[], None]) -> None:
        while starting := self._starting():
            try:
                async with asyncio.timeout(STARTUP_MESSAGE_S):
                    for runner in starting:
                        await runner.ready.wait()
            except TimeoutError:
                names = ", ".join(runner.spec.name for runner in self._starting())
                self._print_status(f"still starting: {names}; logs are in {self._log_dir}")
        on_ready()

    def _starting(self) -> list[ProcessRunner]:
        return [runner for runner in self._runners.values() if not runner.ready.is_set()]

    async def _stop_all(self) -> None:
        runners = sorted(self._runners.values(), key=lambda runner: runner.spec.stop_rank)
        for _, group in groupby(runners, key=lambda runner: runner.spec.stop_rank):
            same_rank = list(group)
            if not self._killing:
                self._print_status(f"stopping {', '.join(runner.spec.name for runner in same_rank)}")
            await asyncio.gather(*(runner.stop() for runner in same_rank))


def _status(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    return next((known.name for known in signal.Signals if known == -status), f"signal {-status}")
