"""A file of lines, read as it comes, from any offset."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FileLine:
    """A line, by its number from 1 where the reading began; `end` is the offset after it. `raw` of None: too long."""

    number: int
    end: int
    raw: bytes | None

    @property
    def blank(self) -> bool:
        return self.raw is not None and not self.raw


async def read_lines(pieces: AsyncIterator[bytes], at: int, max_bytes: int) -> AsyncGenerator[FileLine]:
    """Yield the lines of what begins at offset `at`; holds no more than one piece and one line of `max_bytes`."""
    held, number, too_long = bytearray(), 0, False

    def line(end: int) -> FileLine:
        return FileLine(number, end, None if too_long else bytes(held).strip(b" \t\r"))

    async for piece in pieces:
        start = 0
        while (stop := piece.find(b"\n", start)) >= 0:
            too_long = too_long or len(held) + stop - start > max_bytes
            if not too_long:
                held += piece[start:stop]
            number += 1
            yield line(at + stop + 1)
            held.clear()
            start, too_long = stop + 1, False
        too_long = too_long or len(held) + len(piece) - start > max_bytes
        if too_long:
            held.clear()
        else:
            held += piece[start:]
        at += len(piece)
    if held or too_long:
        number += 1
        yield line(at)
