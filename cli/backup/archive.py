"""The file of a backup: a tar of facts, the snapshot of Redis, the files of the storage, and their digests last.

`tar -xf FILE` and `sha256sum -c SHA256SUMS` read it too.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import IO, Any, BinaryIO

FACTS = "fusequeue-backup.json"
SNAPSHOT = "redis/dump.rdb"
STORAGE = "storage"
DIGESTS = "SHA256SUMS"
CHUNK_BYTES = 1024 * 1024


class DamagedBackup(Exception):
    """A file that is no complete backup."""


class _Hashed:
    """A file that is read once, and hashed meanwhile."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        try:
            data = self._file.read(size)
        except tarfile.TarError as error:
            raise DamagedBackup(str(error)) from error
        self._hash.update(data)
        return data

    def digest(self) -> str:
        return self._hash.hexdigest()


class ArchiveWriter:
    """Appends files to an archive; one that is added again replaces the earlier one."""

    def __init__(self, file: BinaryIO) -> None:
        self._tar = tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT)  # noqa: SIM115 - `close` ends it
        self._digests: dict[str, str] = {}

    def add(self, name: str, file: BinaryIO) -> int:
        """Add a file from its position to its end, and return its size."""
        begin = file.tell()
        member = tarfile.TarInfo(name)
        member.mode, member.size = 0o600, file.seek(0, os.SEEK_END) - begin
        file.seek(begin)
        hashed: Any = _Hashed(file)
        self._tar.addfile(member, hashed)
        _forget_members(self._tar)
        self._digests[name] = hashed.digest()
        return member.size

    def close(self) -> None:
        """Write the digests, which make it complete."""
        lines = (f"{digest}  {name}\n" for name, digest in self._digests.items())
        self.add(DIGESTS, io.BytesIO("".join(lines).encode()))
        self._tar.close()


def read_archive(file: BinaryIO) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield the name and contents of each file but the digests; raises `DamagedBackup` at the latest at the end.

    Names are relative paths without `..`, so that no file is written outside the folder that they are restored to.
    """
    digests: dict[str, str] = {}
    expected: dict[str, str] | None = None
    try:
        with tarfile.open(fileobj=file, mode="r|") as tar:
            while (member := tar.next()) is not None:
                contents = tar.extractfile(member) if member.isfile() else None
                if contents is None or expected is not None or not _is_inside(member.name):
                    raise DamagedBackup(f"it has an entry that no backup has: {member.name!r}")
                if member.name == DIGESTS:
                    expected = _parse_digests(contents.read())
                    continue
                hashed: Any = _Hashed(contents)
                yield member.name, hashed
                while hashed.read(CHUNK_BYTES):
                    pass
                digests[member.name] = hashed.digest()
                _forget_members(tar)
    except (tarfile.TarError, EOFError, UnicodeDecodeError, ValueError) as error:
        raise DamagedBackup(str(error)) from error
    if expected is None:
        raise DamagedBackup("its end is missing")
    if digests != expected:
        wrong = sorted(name for name in {**digests, **expected} if digests.get(name) != expected.get(name))
        raise DamagedBackup(f"{len(wrong)} files differ from their digests, such as {wrong[0]}")


def _forget_members(tar: Any) -> None:
    """Free what a tar remembers of its files: of a million, about a gigabyte."""
    tar.members.clear()


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def _parse_digests(data: bytes) -> dict[str, str]:
    pairs = (line.split("  ", 1) for line in data.decode().splitlines())
    return {name: digest for digest, name in pairs}
