"""Bytes on their way to a client that reads more slowly than they are made."""

from __future__ import annotations

import asyncio
import tempfile
from collections import deque
from typing import BinaryIO

MEMORY_BYTES = 256 * 1024
DISK_BYTES = 64 * 1024 * 1024
_PIECE_BYTES = 64 * 1024


class Spool:
    """A pipe between one writer and one reader: a little in memory, more in a file, and then the writer waits.

    Many clients send all of a body before they read any answer: without the file, both sides would wait for ever.
    """

    def __init__(self, *, memory_bytes: int = MEMORY_BYTES, disk_bytes: int = DISK_BYTES) -> None:
        self._memory_bytes = memory_bytes
        self._disk_bytes = disk_bytes
        self._pieces: deque[bytes] = deque()
        self._in_memory = 0
        self._file: BinaryIO | None = None
        self._read_at = 0
        self._write_at = 0
        self._ended = False
        self._changed = asyncio.Condition()

    async def write(self, data: bytes) -> None:
        """Append `data`, waiting for the reader when memory and disk are full."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._write_at - self._read_at < self._disk_bytes)
            # Once something is in the file, all that follows goes there until it is empty: the order is kept.
            if self._write_at == self._read_at and self._in_memory + len(data) <= self._memory_bytes:
                self._pieces.append(data)
                self._in_memory += len(data)
            else:
                await asyncio.to_thread(self._append, data)
                self._write_at += len(data)
            self._changed.notify_all()

    async def end(self) -> None:
        """Say that nothing more will be written."""
        async with self._changed:
            self._ended = True
            self._changed.notify_all()

    async def read(self) -> bytes:
        """Return what comes next, as soon as there is something; b"" at the end."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._pieces or self._write_at > self._read_at or self._ended)
            if self._pieces:
                data = b"".join(self._pieces)
                self._pieces.clear()
                self._in_memory = 0
            else:
                data = await asyncio.to_thread(self._take, min(_PIECE_BYTES, self._write_at - self._read_at))
                self._read_at += len(data)
                if self._file is not None and self._read_at == self._write_at:
                    await asyncio.to_thread(self._file.truncate, 0)
                    self._read_at = self._write_at = 0
            self._changed.notify_all()
            return data

    def close(self) -> None:
        """Give the file back."""
        if self._file is not None:
            self._file.close()

    def _append(self, data: bytes) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._file.seek(self._write_at)
        self._file.write(data)

    def _take(self, size: int) -> bytes:
        if self._file is None:
            return b""
        self._file.seek(self._read_at)
        return self._file.read(size)
