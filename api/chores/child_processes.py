"""Child processes, one per name, until a signal: started again when they are killed, stopped together."""

import gc
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType

import structlog

from shared.runtime.backoff import backoff_s
from shared.runtime.parent_process import end_with_parent

log = structlog.get_logger()

EXIT_CONFIGURATION = 1
"""Status of a child that would fail again: all stop."""

MAX_PAUSE_S = 30.0
_LONG_LIFE_S = 60.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)


@dataclass
class _Child:
    """`pid` is 0 while the process is not running; then it starts at `start_at_s`."""

    name: str
    pid: int = 0
    start_at_s: float = 0.0
    started_at_s: float = 0.0
    failures: int = 0


class ChildProcesses:
    """Forks a process for each name, which calls `run` with it.

    They are forks, not new programs, since they share the memory of what this process has imported: three idle
    processes take a third of the memory of three programs. On Linux they end with this process.
    """

    def __init__(self, names: Sequence[str], run: Callable[[str], int]) -> None:
        self._children = [_Child(name) for name in names]
        self._run = run
        self._stopping = False
        self._status = 0

    def run(self) -> int:
        """Return 0 after SIGTERM or SIGINT and the end of all children, or the status of one that cannot run."""
        # Signals wake the select below; their handlers would not interrupt it.
        wake, wakeup = socket.socketpair()
        with wake, wakeup:
            for end in (wake, wakeup):
                end.setblocking(False)
            signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
            signal.signal(signal.SIGCHLD, lambda *_: None)
            for name in (signal.SIGTERM, signal.SIGINT):
                signal.signal(name, self._stop)
            try:
                while True:
                    self._start_due()
                    if self._stopping and not any(child.pid for child in self._children):
                        return self._status
                    if select.select([wake], [], [], self._pause_s())[0]:
                        wake.recv(4096)
                    self._reap()
            finally:
                signal.set_wakeup_fd(-1)

    def _pause_s(self) -> float | None:
        """Return the time until the next start, None without one."""
        starts = [child.start_at_s for child in self._children if not child.pid]
        return None if self._stopping or not starts else max(0.0, min(starts) - time.monotonic())

    def _start_due(self) -> None:
        now_s = time.monotonic()
        for child in self._children:
            if not child.pid and not self._stopping and child.start_at_s <= now_s:
                child.started_at_s = now_s
                # A signal that comes during a fork is handled after it, by the right one of the two processes.
                signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
                child.pid = self._fork(child.name)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    def _fork(self, name: str) -> int:
        parent = os.getpid()
        sys.stderr.flush()
        gc.freeze()  # a collection in a child would copy the pages of all shared objects
        if pid := os.fork():
            return pid
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which stops the children
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            end_with_parent(parent)
            status = self._run(name)
        except SystemExit:  # rq's reply to a second signal
            status = 0
        except BaseException:
            log.exception("chores_crashed", queue=name)
            status = 70
        finally:
            os._exit(status)

    def _reap(self) -> None:
        for child in self._children:
            if not child.pid:
                continue
            pid, how = os.waitpid(child.pid, os.WNOHANG)
            if pid:
                child.pid = 0
                self._ended(child, os.waitstatus_to_exitcode(how))

    def _ended(self, child: _Child, status: int) -> None:
        if self._stopping:
            return
        if status == EXIT_CONFIGURATION:
            self._status = status
            self._stop(signal.SIGTERM, None)
            return
        now_s = time.monotonic()
        child.failures = 1 if now_s - child.started_at_s > _LONG_LIFE_S else child.failures + 1
        pause_s = backoff_s(child.failures, 1.0, MAX_PAUSE_S)
        child.start_at_s = now_s + pause_s
        log.warning("chores_process_ended", queue=child.name, status=status, starts_again_s=pause_s)

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        self._stopping = True
        for child in self._children:
            if child.pid:
                os.kill(child.pid, signal.SIGTERM)
