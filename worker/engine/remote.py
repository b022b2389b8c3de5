"""The engine in a process of its own: Python runs one thread at a time, and the engine's is not to wait for the loop's.

What reads messages or writes them are threads of this side; the engine is on the other (`worker.engine.process`).
"""

from __future__ import annotations

import queue
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import structlog

from shared.config.models_file import Catalog
from shared.config.settings import Settings
from shared.errors import ConfigurationError, FusequeueError
from worker.engine import Activity, EngineEvents, EngineRequest, EngineStatus
from worker.engine.channel import Channel

log = structlog.get_logger()

SILENT_S = 2.0  # many times what lies between two messages of an engine
KILL_AFTER_S = 5.0  # beyond the time that a stop was given


class RemoteEngine:
    """An engine at the other end of a socket. Its listener is called on a thread that only reads messages.

    A process that ended is told like a thread that died: as busy since minus infinity.
    """

    def __init__(self, catalog: Catalog, listener: EngineEvents, settings: Settings) -> None:
        self._listener = listener
        self._standing = EngineStatus(device=settings.device or "unknown")
        self._heard_s = time.monotonic()
        self._in_hand: set[str] = set()  # jobs between seat() and finished()
        self._silent_since_s: float | None = None
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._outbox.put((catalog, settings))
        self._process: subprocess.Popen[bytes] | None = None
        self._warm = threading.Event()
        self._gone = threading.Event()
        self._failure: FusequeueError | None = None
        self._stopping = False

    def start(self) -> None:
        own, other = socket.socketpair()
        with other:
            command = [sys.executable, "-m", "worker.engine.process", str(other.fileno())]
            # A group of its own: Ctrl-C in a terminal is for the worker, which ends its engine when it has drained.
            self._process = subprocess.Popen(command, pass_fds=[other.fileno()], process_group=0)
        channel = Channel(own)
        for work, name in ((self._read, "hear-engine"), (self._write, "tell-engine")):
            threading.Thread(target=work, args=(channel,), name=name, daemon=True).start()

    def warm_up(self) -> None:
        self._outbox.put(("warm_up",))
        while not self._warm.wait(0.1):
            if self._gone.is_set():
                raise self._failure or ConfigurationError(
                    f"the engine's process ended with status {self._status()} before its models were loaded; the lines "
                    "above may say why, and -9 is what ends a process when memory is short"
                )

    def stop(self, timeout_s: float) -> None:
        self._stopping = True
        self._outbox.put(("stop", timeout_s))
        if self._process is None:
            return
        try:
            self._process.wait(timeout_s + KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            log.warning("engine_killed", reason=f"it did not end within {timeout_s:g} s")
            self._process.kill()
            self._process.wait()
        self._gone.wait(KILL_AFTER_S)

    def submit(self, *requests: EngineRequest) -> None:
        self._in_hand.update(request.claim_key for request in requests)
        self._outbox.put(("submit", *requests))

    def cancel(self, claim_key: str) -> None:
        self._outbox.put(("cancel", claim_key))

    def release_all(self) -> None:
        self._outbox.put(("release_all",))

    def status(self) -> EngineStatus:
        standing = self._standing
        if self._gone.is_set():
            return replace(standing, activity=Activity(busy=True, since_s=float("-inf")))
        now = time.monotonic()
        if not self._in_hand or now - self._heard_s <= SILENT_S:
            self._silent_since_s = None
            return standing
        # A process that is stopped, or has one thread that keeps Python to itself, does not tell of its activity. That
        # counts from when it is noticed: it may be this process that was stopped.
        self._silent_since_s = self._silent_since_s or now
        return replace(standing, activity=replace(standing.activity, busy=True, since_s=self._silent_since_s))

    def _write(self, channel: Channel) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                channel.send(message)
        except OSError:
            pass  # who reads is told as well

    def _read(self, channel: Channel) -> None:
        try:
            while True:
                message = channel.receive()
                self._heard_s = time.monotonic()
                if isinstance(message, FusequeueError):
                    self._failure = message
                else:
                    self._hear(*message)
        except (EOFError, OSError):
            if not self._stopping:
                log.error("engine_process_ended", status=self._status(), jobs=len(self._in_hand))
        finally:
            self._gone.set()
            self._outbox.put(None)
            channel.close()

    def _hear(self, told: list[tuple[str, tuple[Any, ...]]], standing: EngineStatus | None) -> None:
        if standing is not None:
            self._standing = standing
        for name, arguments in told:
            if name == "warm":
                self._warm.set()
                continue
            if name == "finished":
                self._in_hand.discard(arguments[0])
            getattr(self._listener, name)(*arguments)

    def _status(self) -> int | None:
        """Return the status that the process ended with, after a moment if need be."""
        try:
            return None if self._process is None else self._process.wait(KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            return None
