"""A connection to the Redis of a `fusequeue up`, which can receive a snapshot of its data as a replica does."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO
from urllib.parse import urlsplit

from shared.errors import RedisUnavailable

SILENT_S = 60.0
"""Longest time without a byte; Redis sends a newline each second while it writes the snapshot."""

CHUNK_BYTES = 1024 * 1024
END = b"$EOF:"  # before the mark that follows a snapshot whose size is not known in advance


class RedisConnection:
    """A connection; its errors are `RedisUnavailable`."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        with self._errors():
            self._socket = socket.create_connection((parts.hostname or "", parts.port or 6379), SILENT_S)
            self._file = self._socket.makefile("rb")
        try:
            self._call("AUTH", parts.password or "")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RedisConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def version(self) -> str:
        return self._info("server")["redis_version"]

    def used_bytes(self) -> int:
        return int(self._info("memory")["used_memory"])

    def key_count(self) -> int:
        return int(self._call("DBSIZE"))

    def snapshot(self, file: BinaryIO, give_up_s: float) -> None:
        """Write all data, as an RDB file, to `file`; raises `TimeoutError` at the `time.monotonic()` of `give_up_s`."""
        self._call("REPLCONF", "capa", "eof")
        with self._errors():
            self._send("SYNC")
            while (head := self._file.readline()) == b"\n":
                _check_time(give_up_s)
            if head.startswith(END):
                self._copy_until(head.removeprefix(END).strip(), file, give_up_s)
            else:
                self._copy(int(_reply(head)), file, give_up_s)

    def _copy(self, size: int, file: BinaryIO, give_up_s: float) -> None:
        while size:
            chunk = self._file.read1(min(size, CHUNK_BYTES))
            if not chunk:
                raise ConnectionError("the connection closed within the snapshot")
            file.write(chunk)
            size -= len(chunk)
            _check_time(give_up_s)

    def _copy_until(self, mark: bytes, file: BinaryIO, give_up_s: float) -> None:
        held = b""  # the mark can arrive in parts
        while not held.endswith(mark):
            chunk = self._file.read1(CHUNK_BYTES)
            if not chunk:
                raise ConnectionError("the connection closed within the snapshot")
            held += chunk
            file.write(held[: -len(mark)])
            held = held[-len(mark) :]
            _check_time(give_up_s)

    def _info(self, section: str) -> dict[str, str]:
        lines = self._call("INFO", section).splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)

    def _call(self, *words: str) -> str:
        """Send a command and return its reply, a line or a text."""
        with self._errors():
            self._send(*words)
            head = self._file.readline()
            if not head.startswith(b"$"):
                return _reply(head)
            return self._file.read(int(_reply(head)) + 2)[:-2].decode("utf-8", "replace")

    def _send(self, *words: str) -> None:
        parts = [f"${len(word.encode())}\r\n{word}\r\n" for word in words]
        self._socket.sendall(f"*{len(words)}\r\n{''.join(parts)}".encode())

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (ConnectionError, socket.gaierror, TimeoutError) as error:
            if isinstance(error, _OutOfTime):
                raise
            raise RedisUnavailable(f"cannot reach Redis: {error or 'it does not respond'}") from error


class _OutOfTime(TimeoutError):
    pass


def _check_time(give_up_s: float) -> None:
    if time.monotonic() > give_up_s:
        raise _OutOfTime


def _reply(line: bytes) -> str:
    """Return a reply without its type; raises `ConnectionError` for an error, or none at all."""
    text = line.decode("utf-8", "replace").strip()
    if not text or text[0] not in "+:$":
        raise ConnectionError(text.removeprefix("-") or "it closed the connection")
    return text[1:]
