"""Processes of the product as forks of one process that has imported its libraries: see `harness.fork_server`.

`install` makes `subprocess` start them so; tests and the harness use `subprocess` as usual. A command that is not
`python -m` with a module of `FORKED`, or whose environment changes how libraries are imported, starts as usual.
"""

from __future__ import annotations

import atexit
import ctypes
import inspect
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORKED = (
    *("api", "chaos.role", "cli.main", "moto.server", "worker", "api.chores"),
    *("worker.engine.checks.memory_fit", "worker.engine.parallel.rank_process", "worker.engine.process"),
)
PARENT_WATCH = "shared.runtime.parent_process"
READ_AT_IMPORT = ("HF_", "HOME", "LD_", "PYTHON")
"""Prefixes of variables that Python or a library reads once. torch and transformers set some of their own."""

PLAIN = {
    **{"executable": None, "preexec_fn": None, "shell": False},
    **{"gid": None, "gids": None, "uid": None},
}
"""Arguments of `subprocess.Popen` without which a command is not forked."""

PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
START_TIMEOUT_S = 120.0
MAX_DESCRIPTORS = 32
COMMAND_BYTES = 500
"""Room for the commands of forks in the server's own, which `ps` shows."""

_POPEN = subprocess.Popen
_PYTHON = sys.executable  # a test can name another one
_SIGNATURE = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]
_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
_TESTS = str(Path(__file__).resolve().parents[1])


@dataclass(frozen=True)
class Start:
    """A process to start: `targets` are the numbers of its descriptors, in the order in which they are sent."""

    module: str
    arguments: tuple[str, ...]
    orphan_signal: int
    environment: dict[str, str]
    folder: str
    targets: tuple[int, ...]
    parent: int
    new_session: bool
    process_group: int
    umask: int


def forkable(command: str | bytes | Sequence[str]) -> tuple[str, tuple[str, ...], int] | None:
    """Return the module of `FORKED`, the arguments and the signal of a parent watch (0: none) of a command."""
    if isinstance(command, str | bytes):
        return None
    words = [str(word) for word in command]
    module, arguments = _module(words)
    orphan_signal = 0
    if module == PARENT_WATCH and len(arguments) > 2 and arguments[0] == str(os.getpid()):
        orphan_signal = int(arguments[1])
        module, arguments = _module(list(arguments[2:]))
    return (module, arguments, orphan_signal) if module in FORKED else None


def _module(words: list[str]) -> tuple[str, tuple[str, ...]]:
    """Return the module that `python -m` runs and its arguments; both are empty for other commands."""
    if words[:1] != [_PYTHON]:
        return "", ()
    words = [word for at, word in enumerate(words) if at != 1 or word != "-P"]
    return (words[2], tuple(words[3:])) if words[1:2] == ["-m"] else ("", ())


class ForkingPopen(subprocess.Popen[Any]):
    """`subprocess.Popen` that lets `fork` start what is forkable."""

    def fork(self, start: Start, descriptors: list[int]) -> int:
        """Start the process and return its pid."""
        return _server.fork(start, descriptors)

    def can_fork(self, environment: Mapping[str, str]) -> bool:
        return _server.enabled and _at_import(environment) == _server.at_import

    def _execute_child(self, *arguments: Any) -> None:
        options = _SIGNATURE.bind(self, *arguments).arguments
        environment = dict(os.environ if options["env"] is None else options["env"])
        found = forkable(options["args"]) if all(options[name] == value for name, value in PLAIN.items()) else None
        if found is None or not self.can_fork(environment):
            _POPEN._execute_child(self, *arguments)  # type: ignore[attr-defined]
            return
        own = [options["p2cread"], options["c2pwrite"], options["errwrite"]]
        descriptors = [number if number >= 0 else at for at, number in enumerate(own)] + list(options["pass_fds"])
        start = Start(
            *found,
            environment=environment,
            folder=str(options["cwd"] or Path.cwd()),
            targets=(0, 1, 2, *options["pass_fds"]),
            parent=os.getpid(),
            new_session=options["start_new_session"],
            process_group=options["process_group"],
            umask=options["umask"],
        )
        try:
            self.pid = self.fork(start, descriptors)
            self._child_created = True
        finally:
            self._close_pipe_fds(*[options[name] for name in PIPES])  # type: ignore[attr-defined]


def _at_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(READ_AT_IMPORT)}


class _Server:
    """The process that forks; it starts at `start` or with the first forkable process, and ends with this one."""

    def __init__(self) -> None:
        self.enabled = sys.platform == "linux"
        self.at_import = _at_import(os.environ)
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("FUSEQUEUE_")}
        self._channel: socket.socket | None = None
        self._lock = threading.Lock()

    def fork(self, start: Start, descriptors: list[int]) -> int:
        """Return the pid of a new child of this process: as a subreaper, it becomes the parent of an orphan."""
        with self._lock:
            channel = self._channel = self._channel or self._started()
            prctl = ctypes.CDLL(None).prctl
            prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                message = pickle.dumps(start)
                socket.send_fds(channel, [len(message).to_bytes(4, "big")], descriptors)
                channel.sendall(message)
                return int.from_bytes(channel.recv(4), "big")
            finally:
                prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def start(self) -> None:
        """Start the server as a fork of this process, which does not import again what this one has imported."""
        if not self.enabled or self._channel is not None:
            return
        from harness import fork_server  # it imports this module

        local, remote = socket.socketpair()
        pid = os.fork()
        if not pid:
            fork_server.serve_as_fork(remote)
        remote.close()
        local.settimeout(START_TIMEOUT_S)
        atexit.register(_end, local, lambda: os.waitpid(pid, 0))
        self._channel = local

    def _started(self) -> socket.socket:
        local, remote = socket.socketpair()
        path = os.pathsep.join([_TESTS, str(Path(_TESTS).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = self._environment | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        with remote:
            command = [sys.executable, "-P", "-m", "harness.fork_server", str(remote.fileno()), " " * COMMAND_BYTES]
            process = _POPEN(command, pass_fds=[remote.fileno()], env=environment, start_new_session=True)
        local.settimeout(START_TIMEOUT_S)
        atexit.register(_end, local, lambda: process.wait(START_TIMEOUT_S))
        return local


def _end(channel: socket.socket, wait: Callable[[], Any]) -> None:
    channel.close()
    wait()


_server = _Server()
start = _server.start


def install() -> None:
    """Let `subprocess` fork the product's processes from now on."""
    subprocess.Popen = ForkingPopen  # type: ignore[misc]
