"""Storage in a folder, for one machine or a shared file system."""

import errno
import os
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

from shared.errors import NotFound, StorageUnavailable
from shared.storage import CHUNK_BYTES, NO_RESPONSE, ObjectInfo, check_key, check_prefix, range_length
from shared.storage.threads import NoResponse, StorageThreads

T = TypeVar("T")

_TYPES = {
    ".png": "image/png",
    ".jpeg": "image/jpeg",
    ".jpg": "image/jpeg",
    ".webp": "image/webp",
    ".mp4": "video/mp4",
    ".wav": "audio/wav",
    ".flac": "audio/flac",
    ".mp3": "audio/mpeg",
    ".opus": "audio/ogg",
    ".glb": "model/gltf-binary",
    ".safetensors": "application/safetensors",
    ".json": "application/json",
    ".jsonl": "application/jsonl",
}
_UNKNOWN_TYPE = "application/octet-stream"
_TEMP = ".incomplete"  # incomplete files; no key starts with a dot
_TEMP_LIFE_S = 3600  # older files were left by a killed process
_TYPE_SUFFIX = "~type"  # content type, if the extension does not imply it; no key contains a tilde
_THREADS = 8
_GONE = (errno.ENOENT, errno.ENOTDIR)
_ADVICE = {
    errno.ENOSPC: "free some space or shorten FUSEQUEUE_RETENTION_S",
    errno.EDQUOT: "raise the quota or shorten FUSEQUEUE_RETENTION_S",
    errno.EACCES: "grant this user write access, or set FUSEQUEUE_STORAGE_DIR",
    errno.EROFS: "mount it writable, or set FUSEQUEUE_STORAGE_DIR",
}
_PUBLIC = {
    errno.ENOSPC: "storage: no space left",
    errno.EDQUOT: "storage: no space left",
    errno.EACCES: "storage: access denied",
    errno.EPERM: "storage: access denied",
    errno.EROFS: "storage: cannot be written",
}
_MKDIR_ATTEMPTS = 6  # a sweep can remove an empty directory before the file is in it


class FolderStorage:
    """Objects as files below `root`: written to a temporary file, flushed, and renamed."""

    def __init__(self, root: Path, *, timeout_s: float, threads: int | None = None) -> None:
        self._root = root.absolute()
        self._threads = StorageThreads(threads or _THREADS, "folder-storage", timeout_s)

    async def put(self, key: str, data: bytes, content_type: str) -> None:
        path = self._path(key)
        write = self._threads.write(key, (data, content_type), lambda: self._write(path, data, content_type))
        await self._translated(write)

    async def head(self, key: str) -> ObjectInfo:
        path = self._path(key)
        return await self._run_reading(lambda: _describe(path))

    async def read(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        path, size = self._path(key), range_length(start, end)
        if size is None or size > CHUNK_BYTES:
            return b"".join([chunk async for chunk in self.stream(key, start, end)])

        def read() -> bytes:
            with _open_at(path, start) as file:
                return file.read(size)

        return await self._run_reading(read)

    async def stream(self, key: str, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        path, left = self._path(key), range_length(start, end)
        file = await self._run_reading(lambda: _open_at(path, start))
        try:
            while left is None or left > 0:
                size = CHUNK_BYTES if left is None else min(CHUNK_BYTES, left)
                chunk = await self._run(lambda: file.read(size))  # noqa: B023 - awaited before `size` changes
                if not chunk:
                    return
                left = None if left is None else left - len(chunk)
                yield chunk
        finally:
            self._threads.close_soon(file)

    async def delete_prefix(self, prefix: str) -> int:
        path = self._root / check_prefix(prefix)
        return await self._run(lambda: self._remove(path))

    async def presigned_url(self, key: str, expires_s: int) -> str | None:
        check_key(key)
        return None

    async def check(self, *, writes: bool = True) -> None:
        def probe() -> None:
            self._write_temp(b"").unlink()
            for temp in (self._root / _TEMP).iterdir():
                with suppress(FileNotFoundError):
                    if time.time() - temp.stat().st_mtime > _TEMP_LIFE_S:
                        temp.unlink()

        await self._run(probe)

    async def close(self) -> None:
        self._threads.close()

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    async def _run(self, work: Callable[[], T]) -> T:
        return await self._translated(self._threads.run(work))

    async def _translated(self, call: Awaitable[T]) -> T:
        """Await a call and raise its errors as those of storage."""
        try:
            return await call
        except NoResponse as error:
            raise StorageUnavailable(
                f"storage folder {self._root} did not respond {error}; check its disk or mount", public=NO_RESPONSE
            ) from error
        except OSError as error:
            advice = _ADVICE.get(error.errno or 0, "check its disk, or set FUSEQUEUE_STORAGE_DIR")
            raise StorageUnavailable(
                f"storage folder {self._root}: {error.strerror or error}; {advice}",
                public=_PUBLIC.get(error.errno or 0),
            ) from error

    async def _run_reading(self, work: Callable[[], T]) -> T:
        try:
            return await self._run(work)
        except StorageUnavailable as error:
            if isinstance(error.__cause__, FileNotFoundError | IsADirectoryError | NotADirectoryError):
                raise NotFound("no such object in storage") from error
            raise

    def _write(self, path: Path, data: bytes, content_type: str) -> None:
        temp = self._write_temp(data)
        try:
            for attempt in range(1, _MKDIR_ATTEMPTS + 1):
                try:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    self._write_type(path, content_type)
                    os.replace(temp, path)
                    break
                except FileNotFoundError:
                    if attempt == _MKDIR_ATTEMPTS:
                        raise
            self._flush_directories(path.parent)
        except IsADirectoryError as error:
            raise ValueError(f"invalid storage key: {path} is a prefix of other keys") from error
        finally:
            temp.unlink(missing_ok=True)

    def _flush_directories(self, folder: Path) -> None:
        """Flush each directory from `folder` up to the root: another writer can have created any of them just now.

        Flushing an unchanged one takes 0.1 ms.
        """
        while folder.is_relative_to(self._root):
            with suppress(FileNotFoundError):  # the object was deleted in the meantime
                _flush_directory(folder)
            folder = folder.parent

    def _write_temp(self, data: bytes) -> Path:
        folder = self._root / _TEMP
        created = [parent for parent in (self._root, *self._root.parents) if not parent.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for directory in created:
            _flush_directory(directory.parent)
        temp = folder / uuid.uuid4().hex
        with open(temp, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return temp

    def _write_type(self, path: Path, content_type: str) -> None:
        type_file = path.with_name(path.name + _TYPE_SUFFIX)
        if content_type == _TYPES.get(path.suffix, _UNKNOWN_TYPE):
            type_file.unlink(missing_ok=True)
        else:
            os.replace(self._write_temp(content_type.encode()), type_file)

    def _remove(self, path: Path) -> int:
        count = 0
        if path.is_file():
            count += _unlink(path)
        elif path.is_dir():
            for folder, _, names in os.walk(path, topdown=False, onerror=_raise_unless_gone):
                count += sum(_unlink(Path(folder, name)) for name in names if not name.endswith(_TYPE_SUFFIX))
                _remove_directory(Path(folder), names)
        parent = path.parent
        with suppress(OSError):  # until a directory is not empty
            while self._root in parent.parents:
                parent.rmdir()
                parent = parent.parent
        return count


def _describe(path: Path) -> ObjectInfo:
    facts = path.stat()
    if not path.is_file():
        raise FileNotFoundError(path)
    try:
        content_type = path.with_name(path.name + _TYPE_SUFFIX).read_text("utf-8")
    except FileNotFoundError:
        content_type = _TYPES.get(path.suffix, _UNKNOWN_TYPE)
    return ObjectInfo(facts.st_size, content_type, f"{facts.st_mtime_ns:x}-{facts.st_ino:x}-{facts.st_size:x}")


def _open_at(path: Path, start: int) -> BinaryIO:
    file = open(path, "rb")  # noqa: SIM115 - the stream closes it
    file.seek(start)
    return file


def _unlink(path: Path) -> int:
    path.with_name(path.name + _TYPE_SUFFIX).unlink(missing_ok=True)
    try:
        path.unlink()
    except FileNotFoundError:
        return 0
    return 1


def _raise_unless_gone(error: OSError) -> None:
    if error.errno not in _GONE:
        raise error


def _remove_directory(folder: Path, names: list[str]) -> None:
    """Remove a directory and the types of objects that are gone, unless another writer has stored an object there."""
    for name in names:
        if name.endswith(_TYPE_SUFFIX):
            Path(folder, name).unlink(missing_ok=True)
    try:
        folder.rmdir()
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            _raise_unless_gone(error)


def _flush_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
