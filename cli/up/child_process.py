"""A child process in its own process group, with its output in a bounded log file."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from shared.runtime.python_command import python_command

LOG_BYTES = 5 * 1024 * 1024
TAIL_LINES = 20
TAIL_LINE_BYTES = 2000
READY_EVENTS = (b"worker_ready", b"chores_ready", b"api_ready")  # log events of a process that accepts work
# Log events of a model that could not be loaded, and of a change of the models file that is not in use.
FAULT_EVENTS = (b'"model_unavailable"', b'"models_file_refused"')
CHUNK_BYTES = 64 * 1024
PARENT_WATCH = "shared.runtime.parent_process"


class BoundedLog:
    """Log file of at most `max_bytes`, rotated to `NAME.1`; keeps the last lines in memory.

    `ready` is set once the current process has logged a readiness event. `on_fault` gets the error of each model that
    could not be loaded, and of the models file, a repeated one once.
    """

    def __init__(
        self, path: Path, max_bytes: int = LOG_BYTES, on_fault: Callable[[str], None] = lambda error: None
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._max_bytes = max_bytes
        self._file = path.open("ab", buffering=0)
        self._lines: deque[bytes] = deque(maxlen=TAIL_LINES)
        self._partial = b""
        self.ready = False
        self._on_fault = on_fault
        self._faults: dict[str, str] = {}  # by model

    def write(self, data: bytes) -> None:
        """Append `data`; what cannot be written, as on a full disk, is lost, and the process runs on."""
        with suppress(OSError):
            self._append(data)
        *lines, self._partial = (self._partial + data).split(b"\n")
        self._lines.extend(line[:TAIL_LINE_BYTES] for line in lines)
        self.ready = self.ready or any(event in line for line in lines for event in READY_EVENTS)
        self._partial = self._partial[:TAIL_LINE_BYTES]
        for line in lines:
            if any(event in line for event in FAULT_EVENTS):
                self._note_fault(line)

    def _note_fault(self, line: bytes) -> None:
        try:
            entry = json.loads(line)
            model, error = str(entry.get("model")), str(entry["error"])
        except (ValueError, KeyError, TypeError, AttributeError):
            return  # it contains the name of the event only
        if self._faults.get(model) != error:
            self._faults[model] = error
            self._on_fault(error)

    def _append(self, data: bytes) -> None:
        """Append to the file, rotated first if it would exceed its bound."""
        if self._file.closed:  # it could not be opened after a rotation
            self._file = self.path.open("ab", buffering=0)
        if os.fstat(self._file.fileno()).st_size + len(data) > self._max_bytes:
            self._file.close()
            self.path.replace(self.path.with_name(self.path.name + ".1"))
            self._file = self.path.open("ab", buffering=0)
        self._file.write(data)

    def begin(self) -> None:
        """Reset the tail and `ready` for a new process."""
        self._lines.clear()
        self._partial = b""
        self.ready = False

    def tail(self) -> list[str]:
        """Return the last lines of the current process."""
        lines = [*self._lines, self._partial] if self._partial else list(self._lines)
        return [line.decode("utf-8", "replace") for line in lines]

    def close(self) -> None:
        self._file.close()


class Process:
    """A running child process. The caller of `start` must await `wait`, which kills leftover descendants."""

    def __init__(self, child: asyncio.subprocess.Process, output: asyncio.Task[None], log: BoundedLog) -> None:
        self._child = child
        self._output = output
        self.log = log

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        log: BoundedLog,
        orphan_signal: int = signal.SIGKILL,
        descriptors: Sequence[int] = (),
    ) -> Process:
        """Start `command`, which receives `orphan_signal` if this process dies without stopping it.

        It inherits `descriptors`.
        """
        parent_watch = python_command(PARENT_WATCH, str(os.getpid()), str(int(orphan_signal)))
        log.begin()
        # Not asyncio's own pipe: its `wait` does not return while a grandchild holds the child's output open.
        reader_fd, writer_fd = os.pipe()
        try:
            child = await asyncio.create_subprocess_exec(
                *parent_watch,
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writer_fd,
                stderr=writer_fd,
                env=env,
                pass_fds=descriptors,
                # Linux shares CPU time between sessions first (sched_autogroup). In one session, the API and Redis
                # waited for the engine next to another busy process: 8 clients got a tenth fewer images.
                start_new_session=True,
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
        """Return the exit status (negative for a signal) once the process and its descendants have ended."""
        status = await self._child.wait()
        self.kill()
        await self._output
        return status

    def terminate(self) -> None:
        with suppress(ProcessLookupError):
            self._child.terminate()

    def kill(self) -> None:
        """Send SIGKILL to the whole process group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, signal.SIGKILL)


async def _copy(reader_fd: int, log: BoundedLog) -> None:
    reader = asyncio.StreamReader()
    pipe = os.fdopen(reader_fd, "rb", 0)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    try:
        while data := await reader.read(CHUNK_BYTES):
            log.write(data)
    finally:
        transport.close()
