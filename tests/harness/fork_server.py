"""`python -m harness.fork_server DESCRIPTOR`: forks of a process that has imported what the product's processes import.

A worker with its engine so starts in a fraction of a second of CPU time instead of 14 s. Requests come over the socket
DESCRIPTOR: the length of a pickled `Start` with the child's descriptors, then the `Start`; the response is the pid. The
process that asks becomes the child's parent: it is a subreaper, and the child an orphan.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.forks import MAX_DESCRIPTORS, ForkingPopen, Start
from shared.runtime.parent_process import end_with_parent

IMPORTED = (
    *("api.app", "cli.main", "moto.server", "uvicorn", "uvloop", "worker.worker"),
    *("worker.chores.batch_pass", "worker.chores.rq_worker", "worker.chores.webhooks", "worker.metrics.http_port"),
    *("worker.engine.engine", "demo.components", "diffusers.loaders", "diffusers.models", "transformers"),
)
"""Modules whose imports take most of the processes' starts. The modules that the processes run are imported anew."""

FIRST_HIGH_DESCRIPTOR, LAST_DESCRIPTOR = 500, 70_000


class NestedForkingPopen(ForkingPopen):
    """In a fork, `subprocess.Popen` that forks this process itself while it has one thread, those of asyncio aside."""

    def can_fork(self, environment: Mapping[str, str]) -> bool:
        return all(thread.name.startswith(("MainThread", "asyncio-waitpid-")) for thread in threading.enumerate())

    def fork(self, start: Start, descriptors: list[int]) -> int:
        return os.fork() or become(start, descriptors)


def become(start: Start, descriptors: list[int]) -> int:
    """Make this fork look like a new process, and run the module of `start`; does not return."""
    status = 1
    try:
        gc.freeze()  # what the parent had open is not collected: its descriptors have new owners
        _place(descriptors, start.targets)
        _reset_signals()
        _show_command([sys.executable, "-m", start.module, *start.arguments])
        asyncio._set_running_loop(None)
        if start.new_session:
            os.setsid()
        elif start.process_group >= 0:
            os.setpgid(0, start.process_group)
        if start.umask >= 0:
            os.umask(start.umask)
        os.chdir(start.folder)
        os.environ.clear()
        os.environ.update(start.environment)
        sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115 - for the life of the process
        sys.stdout = sys.__stdout__ = open(1, "w", 1, closefd=False)  # noqa: SIM115
        sys.stderr = sys.__stderr__ = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        while os.getppid() != start.parent:  # the process between this one and the server has not ended yet
            time.sleep(0.0005)
        if start.orphan_signal:
            end_with_parent(start.parent, start.orphan_signal)
        status = _run(start.module, start.arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(status & 0xFF)


def _place(descriptors: list[int], targets: tuple[int, ...]) -> None:
    """Give the descriptors their numbers and close all others."""
    high = [fcntl.fcntl(number, fcntl.F_DUPFD, FIRST_HIGH_DESCRIPTOR) for number in descriptors]
    for number, target in zip(high, targets, strict=True):
        os.dup2(number, target)
    first = 0
    for target in sorted(targets):
        if first < target:  # CPython 3.11 closes all for an empty range
            os.closerange(first, target)
        first = target + 1
    os.closerange(first, LAST_DESCRIPTOR)


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _show_command(command: list[str]) -> None:
    """Replace the command line that `ps` shows; it is cut at the length of the server's."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5)
    text = "".join(f"{word}\0" for word in command).encode()[: end - begin - 1]
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


def _run(module: str, arguments: tuple[str, ...]) -> int:
    """Run a module as `python -m` does, and what follows its end; return the exit status."""
    sys.argv = ["", *arguments]
    if not hasattr(sys.modules.get(module), "__path__"):  # runpy warns of a module that is imported already
        sys.modules.pop(module, None)
    subprocess.Popen = NestedForkingPopen  # type: ignore[misc]
    status: Any = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        status = error.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    if not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined] - joins the threads that are not daemons
    atexit._run_exitfuncs()
    return status


def _child_of_a_child(start: Start, descriptors: list[int], channel: socket.socket) -> int:
    """Start the process; return its pid once its parent is `start.parent`."""
    reader, writer = os.pipe()
    between = os.fork()
    if not between:
        pid = os.fork()
        if not pid:
            channel.close()
            become(start, descriptors)
        os.write(writer, pid.to_bytes(4, "big"))
        os._exit(0)
    pid = int.from_bytes(os.read(reader, 4), "big")
    os.waitpid(between, 0)
    for number in (reader, writer, *descriptors):
        os.close(number)
    return pid


def main(descriptor: int) -> None:
    """Fork until the process at the other end has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in IMPORTED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    channel = socket.socket(fileno=descriptor)
    while True:
        length, descriptors, _, _ = socket.recv_fds(channel, 4, MAX_DESCRIPTORS)
        if not length:
            return
        message = b""
        while len(message) < int.from_bytes(length, "big"):
            message += channel.recv(65536)
        channel.sendall(_child_of_a_child(pickle.loads(message), descriptors, channel).to_bytes(4, "big"))


if __name__ == "__main__":
    main(int(sys.argv[1]))
