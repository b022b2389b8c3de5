"""Restores a backup to a new folder for `fusequeue up`."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from cli.backup.archive import CHUNK_BYTES, FACTS, SNAPSHOT, STORAGE, DamagedBackup, read_archive
from cli.backup.create import FORMAT, BackupFacts, Print, Progress
from cli.backup.redis_data import LOAD_FILE, running_server
from cli.messages import readable
from cli.up import folder_lock, redis_server
from shared.errors import ConfigurationError
from shared.job import QUEUE_SCHEMA
from shared.runtime.clock import VERSION


def restore_backup(source: Path, data_dir: Path, timeout_s: float, print_line: Print) -> None:
    """Restore the file `source` to `data_dir`, which appears when all of it is there and Redis has loaded its data.

    Raises `ConfigurationError` for a folder that is in use or not empty, and for a backup of another version;
    `DamagedBackup`, and `TimeoutError` after `timeout_s`.
    """
    progress = Progress(print_line, time.monotonic() + timeout_s)
    _check_unused(data_dir)
    nbytes, free = source.stat().st_size, shutil.disk_usage(data_dir.parent).free
    if free < nbytes:
        raise ConfigurationError(f"{data_dir.parent} has {readable(free)} free; this takes {readable(nbytes)}")
    with _made_beside(data_dir) as folder:
        facts = _extract(source, folder, progress)
        redis = folder / "redis"
        (redis / redis_server.VERSION_FILE).write_text(facts.redis_version, "ascii")
        with running_server(redis) as connection:
            keys = connection.key_count()
        (redis / "redis.conf").unlink()  # the next `fusequeue up` writes its own
        os.sync()
    print_line(f"{data_dir}: {progress.summary()}, {keys} keys of Redis, as of {facts.created_at}")
    for line in _next_steps(facts, data_dir):
        print_line(line)


def _next_steps(facts: BackupFacts, data_dir: Path) -> Iterator[str]:
    """Yield how to start the service, and what the backup did not have."""
    if facts.storage is None:
        yield "the images are in the bucket of the deployment, if they still are: start with its FUSEQUEUE_S3_ settings"
    namespace = f"FUSEQUEUE_NAMESPACE={facts.namespace} " if facts.namespace else ""
    yield f"start it with: {namespace}fusequeue up --data-dir {shlex.quote(str(data_dir))}"
    yield "keys that were revoked since the backup are valid again: revoke them again"


def _check_unused(data_dir: Path) -> None:
    lock = data_dir / "lock"
    if lock.is_file():
        folder_lock.lock(lock, "--data-dir").close()  # raises an error that names the process
    if data_dir.exists() and any(data_dir.iterdir()):
        raise ConfigurationError(f"{data_dir} is not empty; move it away, or choose another --data-dir")


def _extract(source: Path, folder: Path, progress: Progress) -> BackupFacts:
    """Write the files of a backup to `folder`, those of a storage to its `storage`; return its facts."""
    facts: BackupFacts | None = None
    with source.open("rb") as file:
        for name, contents in read_archive(file):
            if facts is None:
                facts = _parse_facts(name, contents)
            elif name == SNAPSHOT:
                progress.count(_write(folder / "redis" / LOAD_FILE, contents))
            elif name.startswith(f"{STORAGE}/"):
                progress.count(_write(folder / name, contents))
            else:
                raise DamagedBackup(f"it has an entry that no backup has: {name!r}")
    if facts is None or not (folder / "redis" / LOAD_FILE).is_file():
        raise DamagedBackup("it has no data of Redis")
    return facts


def _parse_facts(name: str, contents: IO[bytes]) -> BackupFacts:
    """Return the facts; raises `ConfigurationError` for those that this program cannot restore."""
    if name != FACTS:
        raise DamagedBackup("it is no backup of fusequeue")
    try:
        facts: dict[str, Any] = dict(json.loads(contents.read(CHUNK_BYTES)))
    except (ValueError, TypeError) as error:
        raise DamagedBackup(f"{FACTS}: {error}") from error
    if facts.get("format") != FORMAT or facts.get("queue_schema") != QUEUE_SCHEMA:
        raise ConfigurationError(
            f"the backup is of fusequeue {facts.get('version')} (format {facts.get('format')}, queue schema "
            f"{facts.get('queue_schema')}), this is {VERSION} ({FORMAT}, {QUEUE_SCHEMA}); restore it with that version"
        )
    try:
        return BackupFacts(**facts)
    except TypeError as error:
        raise DamagedBackup(f"{FACTS}: {error}") from error


def _write(path: Path, contents: IO[bytes]) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        while chunk := contents.read(CHUNK_BYTES):
            file.write(chunk)
        return file.tell()


@contextmanager
def _made_beside(data_dir: Path) -> Iterator[Path]:
    """Yield a folder that only this user can read, and that becomes `data_dir`; one that was left is emptied."""
    folder = data_dir.with_name(f".{data_dir.name}.restoring")
    folder.mkdir(mode=0o700, exist_ok=True)
    with folder_lock.lock(folder / "lock", "--data-dir"):
        try:
            _empty(folder)
            yield folder
            folder.rename(data_dir)
        finally:
            if folder.exists():
                shutil.rmtree(folder)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name == "lock":
            continue
        shutil.rmtree(path) if path.is_dir() else path.unlink()
