"""One child process: in a process group of its own, its output in a bounded file, gone with everything it started."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

LOG_BYTES = 5 * 1024 * 1024
TAIL_LINES = 20
TAIL_LINE_BYTES = 2000
READY_WORDS = (b"worker_ready", b"chores_ready")  # what a part logs once it is at work
CHUNK_BYTES = 64 * 1024


class BoundedLog:
    """A log file of at most `max_bytes`; the one before it is kept as `NAME.1`. It remembers its last lines.

    `ready` is set once the process that writes now has said that it is at work.
    """

    def __init__(self, path: Path, max_bytes: int = LOG_BYTES) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._max_bytes = max_bytes
        self._file = path.open("ab")
        self._lines: deque[bytes] = deque(maxlen=TAIL_LINES)
        self._partial = b""
        self.ready = False

    def write(self, data: bytes) -> None:
        """Append `data`; turns the file over first when it would grow past its bound."""
        if self._file.tell() + len(data) > self._max_bytes:
            self._file.close()
            self.path.replace(self.path.with_name(self.path.name + ".1"))
            self._file = self.path.open("ab")
        self._file.write(data)
        self._file.flush()
        *lines, self._partial = (self._partial + data).split(b"\n")
        self._lines.extend(line[:TAIL_LINE_BYTES] for line in lines)
        self.ready = self.ready or any(word in line for line in lines for word in READY_WORDS)
        self._partial = self._partial[:TAIL_LINE_BYTES]

    def begin(self) -> None:
        """Forget the lines so far: another process writes now."""
        self._lines.clear()
        self._partial = b""
        self.ready = False

    def tail(self) -> list[str]:
        """Return the last lines of the process that writes now."""
        lines = [*self._lines, self._partial] if self._partial else list(self._lines)
        return [line.decode("utf-8", "replace") for line in lines]

    def close(self) -> None:
        self._file.close()


class Process:
    """A running child. Whoever starts it awaits `wait`, which also clears away what it left behind."""

    def __init__(self, child: asyncio.subprocess.Process, output: asyncio.Task[None], log: BoundedLog) -> None:
        self._child = child
        self._output = output
        self.log = log

    @classmethod
    async def start(
        cls, command: Sequence[str], *, env: Mapping[str, str], log: BoundedLog, orphan_signal: int = signal.SIGKILL
    ) -> Process:
        """Start `command`; `orphan_signal` is what it gets should this process die without stopping it."""
        leash = (sys.executable, "-P", "-m", "cli.up.parent_watch", str(os.getpid()), str(int(orphan_signal)))
        log.begin()
        # A pipe of our own: asyncio's `wait` would not return while a grandchild holds the child's output open.
        reader_fd, writer_fd = os.pipe()
        try:
            child = await asyncio.create_subprocess_exec(
                *leash,
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writer_fd,
                stderr=writer_fd,
                env=env,
                # Not in a session of its own: Linux deals a core out among sessions first (sched_autogroup), and the
                # priority of the engine's thread would count for nothing against the API and Redis.
                process_group=0,
            )
        except BaseException:
            os.close(reader_fd)
            raise
        finally:
            os.close(writer_fd)
        return cls(child, asyncio.create_task(_copy(reader_fd, log)), log)

    @property
    def pid(self) -> int:
        return self._child.pid

    async def wait(self) -> int:
        """Return the exit status, negative for a signal, once the process and all it started are gone."""
        status = await self._child.wait()
        self.kill()
        await self._output
        return status

    def terminate(self) -> None:
        """Ask it to end."""
        with suppress(ProcessLookupError):
            self._child.terminate()

    def kill(self) -> None:
        """End it and everything it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, signal.SIGKILL)


async def _copy(reader_fd: int, log: BoundedLog) -> None:
    reader = asyncio.StreamReader()
    pipe = os.fdopen(reader_fd, "rb", 0)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    try:
        while data := await reader.read(CHUNK_BYTES):
            log.write(data)
    finally:
        transport.close()
