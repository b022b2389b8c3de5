"""Zip archives that are written while they are sent: the memory of one piece, and of the names of the files."""

import zipfile
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from datetime import UTC, datetime
from typing import NamedTuple

ENTRY_BYTES = 512
"""What a file costs in memory until the end of the archive, which lists all of them."""


class ZipFile(NamedTuple):
    """A file of an archive, whose pieces are read when it is its turn. A `size` that is not known yet is None."""

    name: str
    size: int | None
    modified: datetime
    pieces: AsyncIterator[bytes]


async def zip_archive(files: AsyncGenerator[ZipFile]) -> AsyncGenerator[bytes]:
    """Yield an archive with `files` as they are, not compressed: images and videos already are."""
    sink = _Sink()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_STORED) as archive:  # type: ignore[call-overload]
        async with aclosing(files):
            async for file in files:
                info = zipfile.ZipInfo(file.name, file.modified.astimezone(UTC).timetuple()[:6])
                info.external_attr = 0o644 << 16
                is_large = file.size is None or file.size >= zipfile.ZIP64_LIMIT
                with archive.open(info, "w", force_zip64=is_large) as entry:
                    async for piece in file.pieces:
                        entry.write(piece)
                        yield sink.taken()
    yield sink.taken()


class _Sink:
    """What zipfile writes to: without `tell` and `seek`, so that sizes follow the data of each file."""

    def __init__(self) -> None:
        self._written: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._written.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        pass

    def taken(self) -> bytes:
        """Return what was written since the last call."""
        data = b"".join(self._written)
        self._written.clear()
        return data
