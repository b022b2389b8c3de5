"""NDJSON requests and responses: a splitter for the lines that arrive, and a spool for the lines to send."""

import asyncio
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

MEMORY_BYTES = 256 * 1024
DISK_BYTES = 64 * 1024 * 1024
_READ_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Line:
    """A non-blank line by its number from 1; `raw` is None when it is too long."""

    number: int
    raw: bytes | None


class Splitter:
    """Splits a byte stream into lines, holding at most one of up to `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held = bytearray()
        self._too_long = False
        self.number = 0
        """Number of the last complete line, blank or not."""

    def feed(self, data: bytes) -> Iterator[Line]:
        """Yield the lines that `data` completes, one by one: a small piece can contain many."""
        start = 0
        while (end := data.find(b"\n", start)) >= 0:
            line = self._complete(data[start:end])
            start = end + 1
            if line is not None:
                yield line
        self._hold(data[start:])

    def finish(self) -> Iterator[Line]:
        """Yield the last line if it does not end in a newline."""
        if self._held or self._too_long:
            line = self._complete(b"")
            if line is not None:
                yield line

    def clear(self) -> None:
        """Drop what is held of a line."""
        self._held = bytearray()

    def _complete(self, end: bytes) -> Line | None:
        self.number += 1
        self._hold(end)
        raw, too_long = bytes(self._held).strip(b" \t\r"), self._too_long
        self._held.clear()
        self._too_long = False
        if too_long:
            return Line(self.number, None)
        return Line(self.number, raw) if raw else None

    def _hold(self, data: bytes) -> None:
        if self._too_long or len(self._held) + len(data) > self._max_bytes:
            self._held.clear()
            self._too_long = True
        else:
            self._held += data


class Spool:
    """A pipe from one writer to one reader: a little in memory, more in a file, then the writer waits.

    Many clients send a whole body before they read any response: without the file, both sides would wait forever.
    """

    def __init__(self, *, memory_bytes: int = MEMORY_BYTES, disk_bytes: int = DISK_BYTES) -> None:
        self._file = tempfile.SpooledTemporaryFile(memory_bytes)  # noqa: SIM115 - closed by close()
        self._disk_bytes = disk_bytes
        self._read_at = 0
        self._write_at = 0
        self._ended = False
        self._changed = asyncio.Condition()

    async def write(self, data: bytes) -> None:
        """Append `data`; waits for the reader when the file is full."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._write_at - self._read_at < self._disk_bytes)
            await asyncio.to_thread(self._write, data)
            self._changed.notify_all()

    async def end(self) -> None:
        """Mark the end of the data."""
        async with self._changed:
            self._ended = True
            self._changed.notify_all()

    async def read(self) -> bytes:
        """Return the next bytes as soon as there are any; b"" at the end."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._write_at > self._read_at or self._ended)
            data = await asyncio.to_thread(self._read)
            self._changed.notify_all()
            return data

    def close(self) -> None:
        """Delete the file."""
        self._file.close()

    def _write(self, data: bytes) -> None:
        self._file.seek(self._write_at)
        self._write_at += self._file.write(data)

    def _read(self) -> bytes:
        self._file.seek(self._read_at)
        data = self._file.read(_READ_BYTES)
        self._read_at += len(data)
        if self._read_at == self._write_at:
            self._file.truncate(0)
            self._read_at = self._write_at = 0
        return data
