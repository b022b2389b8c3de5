"""Newline-delimited JSON, cut into lines as it arrives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    """One line that is not blank, by its number from 1; `raw` is None when it is longer than allowed."""

    number: int
    raw: bytes | None


class Splitter:
    """Cuts a byte stream into lines, holding no more than one of at most `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held = bytearray()
        self._too_long = False
        self.number = 0
        """Of the last line that was completed, blank or not."""

    def feed(self, data: bytes) -> Iterator[Line]:
        """Yield the lines that `data` completes, one by one: a small piece may hold very many."""
        start = 0
        while (end := data.find(b"\n", start)) >= 0:
            line = self._complete(data[start:end])
            start = end + 1
            if line is not None:
                yield line
        self._hold(data[start:])

    def finish(self) -> Iterator[Line]:
        """Yield what is left: the last line need not end in a newline."""
        if self._held or self._too_long:
            line = self._complete(b"")
            if line is not None:
                yield line

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
