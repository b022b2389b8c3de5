"""Makes a backup of a folder of `fusequeue up`, while it runs or not."""

from __future__ import annotations

import fcntl
import io
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from cli.backup.archive import FACTS, SNAPSHOT, STORAGE, ArchiveWriter
from cli.backup.redis_connection import RedisConnection
from cli.backup.redis_data import redis_of
from cli.messages import readable
from cli.up import environment
from shared.errors import ConfigurationError
from shared.job import QUEUE_SCHEMA
from shared.runtime.clock import VERSION

FORMAT = 1
INCOMPLETE = ".incomplete"  # folder of the storage: what is being written to it
PROGRESS_EVERY_S = 2.0

Signature = tuple[int, int, int]
Print = Callable[[str], None]


@dataclass(frozen=True)
class BackupFacts:
    """What a backup has of a deployment, and what can read it. `storage` is its folder, None for a bucket."""

    redis_version: str
    storage: str | None
    namespace: str
    created_at: str
    format: int = FORMAT
    version: str = VERSION
    queue_schema: int = QUEUE_SCHEMA


class Progress:
    """Prints what has been done every two seconds, and ends what takes too long with a `TimeoutError`."""

    def __init__(self, print_line: Print, give_up_s: float) -> None:
        self.give_up_s = give_up_s
        self.files = self.nbytes = 0
        self._print = print_line
        self._next_s = time.monotonic() + PROGRESS_EVERY_S

    def count(self, nbytes: int) -> None:
        self.files += 1
        self.nbytes += nbytes
        now_s = time.monotonic()
        if now_s > self.give_up_s:
            raise TimeoutError
        if now_s >= self._next_s:
            self._next_s = now_s + PROGRESS_EVERY_S
            self._print(self.summary())

    def summary(self) -> str:
        return f"{self.files} files, {readable(self.nbytes)}"


def create_backup(data_dir: Path, target: Path, timeout_s: float, print_line: Print) -> None:
    """Write a backup of `data_dir` to the file `target`, which appears when it is complete.

    Raises `ConfigurationError` before anything is written, `TimeoutError` after `timeout_s`.
    """
    progress = Progress(print_line, time.monotonic() + timeout_s)
    if target.exists():
        raise ConfigurationError(f"{target} exists already; choose another name")
    with redis_of(data_dir) as redis:
        facts = _facts(data_dir, redis)
        storage = None if facts.storage is None else Path(facts.storage)
        if storage is not None and target.is_relative_to(storage):
            raise ConfigurationError(f"{target} is in the storage; choose another folder")
        _check_space(target.parent, redis.used_bytes() + (0 if storage is None else _folder_bytes(storage)))
        # The snapshot has a file of its own first: its size comes before it in the archive.
        with _written_beside(target) as file, tempfile.TemporaryFile(dir=target.parent) as snapshot:
            _write(file, facts, redis, snapshot, storage, progress)
    print_line(f"{target}: {progress.summary()}")
    if storage is None:
        print_line("the images are in a bucket, and not in the backup: the bucket needs a copy of its own")


def _facts(data_dir: Path, redis: RedisConnection) -> BackupFacts:
    recorded = environment.recorded(data_dir)
    return BackupFacts(
        redis.version(),
        storage=recorded.get("FUSEQUEUE_STORAGE_DIR"),
        namespace=recorded.get("FUSEQUEUE_NAMESPACE", ""),
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _write(
    file: BinaryIO,
    facts: BackupFacts,
    redis: RedisConnection,
    snapshot: BinaryIO,
    storage: Path | None,
    progress: Progress,
) -> None:
    """Copy the storage, then Redis, then what came to the storage meanwhile.

    So the backup has all files of the jobs in it, but those that were deleted during the second copy.
    """
    archive = ArchiveWriter(file)
    archive.add(FACTS, io.BytesIO(json.dumps(asdict(facts), indent=2).encode() + b"\n"))
    copied = {} if storage is None else _copy_storage(storage, archive, {}, progress)
    redis.snapshot(snapshot, progress.give_up_s)
    snapshot.seek(0)
    progress.count(archive.add(SNAPSHOT, snapshot))
    if storage is not None:
        _copy_storage(storage, archive, copied, progress)
    archive.close()


def _copy_storage(
    root: Path, archive: ArchiveWriter, copied: dict[str, Signature], progress: Progress
) -> dict[str, Signature]:
    """Add the files that are not `copied` yet as they are now; return all."""
    for name, path in _files(root):
        try:
            with path.open("rb") as file:
                facts = os.fstat(file.fileno())
                signature = facts.st_ino, facts.st_mtime_ns, facts.st_size
                if copied.get(name) != signature:
                    progress.count(archive.add(f"{STORAGE}/{name}", file))
                    copied[name] = signature
        except FileNotFoundError:  # its job was deleted meanwhile
            continue
    return copied


def _files(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield the relative name and the path of each file of a storage."""
    for folder, folders, names in os.walk(root):
        if Path(folder) == root and INCOMPLETE in folders:
            folders.remove(INCOMPLETE)
        for path in (Path(folder, name) for name in names):
            if path.is_file() and not path.is_symlink():
                yield path.relative_to(root).as_posix(), path


def _folder_bytes(root: Path) -> int:
    total = 0
    for _, path in _files(root):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


def _check_space(folder: Path, nbytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise ConfigurationError(
            f"{folder} has {readable(free)} free, and the backup takes up to {readable(nbytes)}; choose another folder"
        )


@contextmanager
def _written_beside(target: Path) -> Iterator[BinaryIO]:
    """Yield a file that only this user can read, and that becomes `target` once it is complete and on the disk."""
    part = target.with_name(f"{target.name}.part")
    descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(f"another backup to {target} runs; wait for it, or choose another name") from None
        try:
            os.fchmod(descriptor, 0o600)  # of a part that was left there too
            file.truncate()
            yield file
            file.flush()
            os.fsync(descriptor)
            part.rename(target)
        finally:
            part.unlink(missing_ok=True)
