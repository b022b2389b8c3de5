"""The process that forks the product's processes: it has imported what they import.

A worker with its engine so starts in a fraction of a second of CPU time instead of 14 s. The server is a fork of pytest
before its first test, or `python -m harness.fork_server DESCRIPTOR`. Requests come over a socket: the length of a
pickled `Start` with the child's descriptors, then the `Start`; the response is the pid. The process that asks becomes
the child's parent: it is a subreaper, and the child an orphan.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import importlib.util
import logging
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
import warnings
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from harness.forks import MAX_DESCRIPTORS, ForkingPopen, Start
from shared.runtime.parent_process import end_with_parent

IMPORTED = (
    *("api.app", "moto.server", "uvicorn", "uvloop", "worker.worker"),
    *("cli.main", "cli.backfill.command", "cli.doctor", "cli.jobs", "cli.matching", "cli.processes", "cli.submit"),
    *(
        "api.protocols.openai.batches.batch_pass",
        "api.chores.rq_worker",
        "api.chores.webhooks",
        "worker.metrics.http_port",
    ),
    *("worker.engine.engine", "demo.components", "diffusers.loaders", "diffusers.models", "transformers"),
    *(["cli.mcp.server"] if importlib.util.find_spec("mcp") else []),
)
"""Modules whose imports take most of the processes' starts. The modules that the processes run are imported anew."""

HARMLESS = ("MainThread", "asyncio-waitpid-", "OtelBatch")
"""Beginnings of the names of threads that a fork can do without: OpenTelemetry starts its own again."""

FIRST_HIGH_DESCRIPTOR, LAST_DESCRIPTOR = 500, 70_000


class NestedForkingPopen(ForkingPopen):
    """In a fork, `subprocess.Popen` that forks this process itself while it has no thread but those of `HARMLESS`."""

    def can_fork(self, environment: Mapping[str, str]) -> bool:
        return all(thread.name.startswith(HARMLESS) for thread in threading.enumerate())

    def fork(self, start: Start, descriptors: list[int]) -> int:
        return os.fork() or become(start, descriptors)


def become(start: Start, descriptors: list[int]) -> int:
    """Make this fork look like a new process, and run the module of `start`; does not return."""
    status = 1
    try:
        gc.freeze()  # what the parent had open is not collected: its descriptors have new owners
        _place(descriptors, start.targets)
        _reset_signals()
        os.environ.clear()  # before the command takes its place
        _show_command([sys.executable, "-m", start.module, *start.arguments])
        asyncio._set_running_loop(None)
        if start.new_session:
            os.setsid()
        elif start.process_group >= 0:
            os.setpgid(0, start.process_group)
        if start.umask >= 0:
            os.umask(start.umask)
        os.chdir(start.folder)
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
    """Replace the command line that `ps` shows.

    A command longer than the server's goes on in the place of the server's environment, with spaces between its words:
    the kernel shows it so if the last byte of the place of the arguments is not 0.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end, last = (int(fields[at]) for at in (45, 46, 48))  # arg_start, arg_end and env_end of proc(5)
    text = "".join(f"{word}\0" for word in command).encode()
    if len(text) > end - begin:
        text, end = text.replace(b"\0", b" ")[: last - begin - 1], last
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


def _run(module: str, arguments: tuple[str, ...]) -> int:
    """Run a module as `python -m` does, and what follows its end; return the exit status."""
    sys.argv = ["", *arguments]
    if not hasattr(sys.modules.get(module), "__path__"):  # runpy warns of a module that is imported already
        sys.modules.pop(module, None)
    sys.modules.pop(f"{module}.__main__", None)
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
    _serve(socket.socket(fileno=descriptor))


def serve_as_fork(channel: socket.socket) -> NoReturn:
    """Make this fork of pytest the server; what pytest has open and has replaced is not the server's."""
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        faulthandler.disable()
        os.closerange(3, channel.fileno())
        os.closerange(channel.fileno() + 1, LAST_DESCRIPTOR)
        _forget_exit_functions()
        _reset_warnings()
        sys.meta_path[:] = [one for one in sys.meta_path if not type(one).__module__.startswith("_pytest.")]
        sys.path[:] = [folder for folder in sys.path if folder]
        for name in [name for name in os.environ if name.startswith("FUSEQUEUE_")]:
            del os.environ[name]
        _serve(channel)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _reset_warnings() -> None:
    """Filter warnings as Python does by default: for pytest they are errors."""
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
    warnings.filterwarnings("default", category=DeprecationWarning, module="__main__")


def _forget_exit_functions() -> None:
    """Keep forks from removing the temporary folders of pytest when they end."""
    atexit._clear()
    atexit.register(logging.shutdown)
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]


def _serve(channel: socket.socket) -> None:
    imported = False
    while True:
        length, descriptors, _, _ = socket.recv_fds(channel, 4, MAX_DESCRIPTORS)
        if not length:
            return
        message = b""
        while len(message) < int.from_bytes(length, "big"):
            message += channel.recv(65536)
        if not imported:
            _import()
            imported = True
        channel.sendall(_child_of_a_child(pickle.loads(message), descriptors, channel).to_bytes(4, "big"))


def _import() -> None:
    for module in IMPORTED:
        importlib.import_module(module)
    sys.modules["torch"].set_num_threads(1)
    api = sys.modules["api.app"]
    _prepare(api._routes(api.PROTOCOLS))
    _put_scripts_together()
    gc.collect()
    gc.freeze()


def _prepare(routes: Sequence[Any]) -> None:
    """Prepare the routes of the API, as their first requests would: FastAPI takes 0.25 s of CPU time for all."""
    for route in routes:
        if hasattr(route, "effective_candidates"):
            _prepare(route.effective_candidates())
            route.effective_low_priority_routes()


def _put_scripts_together() -> None:
    """Make the texts of the queue's scripts, which takes 0.13 s of CPU time."""
    scripts, settings = sys.modules["shared.queue.scripts"], sys.modules["shared.config.settings"].Settings()
    for name in vars(scripts.script_methods(None)):
        scripts.script_text(name, settings)


if __name__ == "__main__":
    main(int(sys.argv[1]))
