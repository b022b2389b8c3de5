"""The engine in a separate process, so that its thread does not share Python's lock with the worker's event loop.

Two threads here read and write messages; `worker.engine.process` is the other end.
"""

import queue
import socket
import subprocess
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import structlog

from shared.config.catalog import Catalog
from shared.config.settings import Settings
from shared.errors import ConfigurationError, FusequeueError
from shared.runtime.python_command import python_command
from worker.engine.channel import Channel
from worker.engine.engine_status import Activity, EngineStatus
from worker.engine.protocol import EngineEvents, EngineRequest, JobFinished, MemoryOrders, WarmUpDone
from worker.engine.weights.packages import unused_packages

log = structlog.get_logger()

SILENT_S = 2.0  # the engine sends a status every 0.1 s
KILL_AFTER_S = 5.0  # in addition to the timeout of `stop`


class EngineProcess:
    """A process that imports the engine's libraries, and ends when `channel` closes; `packages` are hidden from it."""

    def __init__(self, packages: Sequence[str]) -> None:
        local, remote = socket.socketpair()
        with remote:
            command = python_command("worker.engine.process", str(remote.fileno()), *packages)
            # Its own process group: Ctrl-C in a terminal must reach only the worker, which drains first.
            self._process = subprocess.Popen(command, pass_fds=[remote.fileno()], process_group=0)
        self.channel = Channel(local)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, timeout_s: float) -> int:
        """Return the exit status; raises `subprocess.TimeoutExpired`."""
        return self._process.wait(timeout_s)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class RemoteEngine:
    """An engine at the other end of a socket. `events.on_event` is called on the reading thread.

    A process that ended after its warm-up is reported as hung; `warm_up` raises the error of one that ended before.
    """

    def __init__(
        self, catalog: Catalog, events: EngineEvents, settings: Settings, process: EngineProcess | None = None
    ) -> None:
        self._events = events
        self._packages = unused_packages(catalog)
        self._status = EngineStatus(device=settings.device or "unknown")
        self._received_at_s = time.monotonic()
        self._unfinished: set[str] = set()
        self._silent_since_s: float | None = None
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._outbox.put((catalog, settings))
        self._process = process
        self._warm = threading.Event()
        self._ended = threading.Event()
        self._failure: FusequeueError | None = None
        self._stopping = False
        self._end = "the connection to the engine process failed"

    def start(self) -> None:
        self._process = self._process or EngineProcess(self._packages)
        for target, name in ((self._read, "engine-reader"), (self._write, "engine-writer")):
            threading.Thread(target=target, args=(self._process.channel,), name=name, daemon=True).start()

    def warm_up(self) -> None:
        self._outbox.put(("warm_up",))
        while not self._warm.wait(0.1):
            if self._ended.is_set():
                raise self._failure or ConfigurationError(
                    f"the engine process ended before its models were loaded: status {self._exit_status()}; see the "
                    "log above, status -9 usually means that memory ran out"
                )

    def stop(self, timeout_s: float) -> None:
        self._stopping = True
        self._outbox.put(("stop", timeout_s))
        if self._process is None:
            return
        try:
            self._process.wait(timeout_s + KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            log.warning("engine_killed", reason=f"it did not stop within {timeout_s:g} s")
            self._process.kill()
        self._ended.wait(KILL_AFTER_S)

    def submit(self, *requests: EngineRequest) -> None:
        self._unfinished.update(request.claim_key for request in requests)
        self._outbox.put(("submit", *requests))

    def cancel(self, claim_key: str) -> None:
        self._outbox.put(("cancel", claim_key))

    def release_all(self) -> None:
        self._outbox.put(("release_all",))

    def take_checkpoints(self, *claim_keys: str) -> None:
        self._outbox.put(("take_checkpoints", *claim_keys))

    def hand_over(self, *claim_keys: str) -> None:
        self._outbox.put(("hand_over", *claim_keys))

    def order_models(self, orders: MemoryOrders) -> None:
        self._outbox.put(("order_models", orders))

    def replace_models(self, catalog: Catalog, changed: Collection[str]) -> None:
        self._outbox.put(("replace_models", catalog, changed))

    def status(self) -> EngineStatus:
        status = self._status
        if self._ended.is_set() and self._warm.is_set():  # before, `warm_up` raises
            return replace(status, activity=Activity(busy=True, since_s=float("-inf")), failure=self._end)
        now = time.monotonic()
        if not self._unfinished or now - self._received_at_s <= SILENT_S:
            self._silent_since_s = None
            return status
        # A process that is stopped, or one of whose threads holds Python's lock, sends no status. The silence counts
        # from its detection, because this process may be the one that was stopped.
        self._silent_since_s = self._silent_since_s or now
        return replace(status, activity=replace(status.activity, busy=True, since_s=self._silent_since_s))

    def _write(self, channel: Channel) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                channel.send(message)
        except OSError:
            pass  # the reading thread gets the same error and handles it
        except Exception:  # for example a message that cannot be pickled: those after it would never be sent
            log.exception("engine_writer_failed")
            self._ended.set()

    def _read(self, channel: Channel) -> None:
        try:
            while True:
                self._handle(channel.receive())
        except (EOFError, OSError):
            if self._warm.is_set() and not self._stopping:
                status = self._exit_status()
                self._end = end_of_process(status)
                log.error("engine_process_ended", status=status, jobs=len(self._unfinished))
        finally:
            self._ended.set()
            self._outbox.put(None)
            channel.close()

    def _handle(self, message: Any) -> None:
        self._received_at_s = time.monotonic()
        if isinstance(message, FusequeueError):
            self._failure = message
            return
        events, status = message
        self._status = status or self._status
        for event in events:
            if isinstance(event, WarmUpDone):
                self._warm.set()
                continue
            if isinstance(event, JobFinished):
                self._unfinished.discard(event.claim_key)
            self._events.on_event(event)

    def _exit_status(self) -> int | None:
        """Return the process's exit status, None if it has not ended within `KILL_AFTER_S`."""
        try:
            return None if self._process is None else self._process.wait(KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            return None


def end_of_process(status: int | None) -> str:
    """Return how a process ended; `status` is None if only the connection closed."""
    if status is None:
        return "the engine process closed its connection"
    if status < 0:
        return f"the engine process was killed by signal {-status}"
    return f"the engine process exited with status {status}"
