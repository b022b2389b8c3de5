"""Storage for input images, results and files: a folder or an S3 bucket behind one protocol.

Keys are paths: results `jobs/{job_id}/{attempt}/{index}.{ext}`, checkpoints
`jobs/{job_id}/checkpoints/{attempt}-{number}-{index}.safetensors`, inputs `inputs/{tenant}/{id}/{token}.{ext}`, files
`files/{tenant}/{id}/{part}.jsonl`; `control/{namespace}/keys-required` is never deleted. Errors are `NotFound`,
`StorageRefused`, or `StorageUnavailable` with a remedy in its message.
"""

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from shared.config.settings import Settings

MAX_KEY_CHARS = 512
CHUNK_BYTES = 256 * 1024
NO_RESPONSE = "storage: no response in time"

# No part starts with a dot: this excludes `.` and `..`, and reserves dot names for the folder storage itself.
_PART = r"[A-Za-z0-9_-][A-Za-z0-9._-]*"
_KEY = re.compile(rf"{_PART}(/{_PART})*")


@dataclass(frozen=True)
class ObjectInfo:
    """Size in bytes, content type and etag of an object; the etag changes with the content."""

    size: int
    content_type: str
    etag: str


class Storage(Protocol):
    """Objects under keys; safe to call from any number of tasks of one event loop."""

    async def put(self, key: str, data: bytes, content_type: str) -> None:
        """Write an object atomically and durably; replaces an existing one."""

    async def head(self, key: str) -> ObjectInfo:
        """Return the facts of an object without reading it."""

    async def read(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """Return the bytes [start, end), fewer if the object is shorter."""

    def stream(self, key: str, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        """Yield the bytes [start, end) in chunks; raises `NotFound` with the first."""

    async def delete_prefix(self, prefix: str) -> int:
        """Delete the object at `prefix` and all objects below it as a path; returns their number. Idempotent.

        `jobs/a` does not include `jobs/ab`.
        """

    async def presigned_url(self, key: str, expires_s: int) -> str | None:
        """Return a URL that reads the object without credentials, for a week at most; None if the storage has none."""

    async def check(self, *, writes: bool = True) -> None:
        """Raise `StorageUnavailable` unless the storage can be reached and, with `writes`, returns what it is sent.

        A bucket is written in the first such check and after a fault: with versioning it keeps each probe.
        """

    async def close(self) -> None:
        """Release threads and connections."""


def check_key(key: str) -> str:
    """Return `key`, or raise `ValueError` if it is invalid; an invalid key is a bug of the caller."""
    if len(key) > MAX_KEY_CHARS or not _KEY.fullmatch(key):
        raise ValueError(f"invalid storage key: {key[:MAX_KEY_CHARS]!r}")
    return key


def check_prefix(prefix: str) -> str:
    """Return `prefix` without a trailing slash; the rules of keys apply."""
    return check_key(prefix.removesuffix("/"))


def range_length(start: int, end: int | None) -> int | None:
    """Return the length of [start, end), or None if it is unbounded."""
    if start < 0 or (end is not None and end < start):
        raise ValueError(f"invalid range: [{start}, {end})")
    return None if end is None else end - start


def connect(settings: Settings, requests: int | None = None) -> Storage:
    """Return the storage of the settings: a bucket if one is set, else a folder. Makes no request yet.

    `requests`: those at a time, if other than usual.
    """
    if settings.s3_bucket is not None:
        from shared.storage.s3 import S3Storage  # imports boto3

        return S3Storage.connect(settings, requests)
    from shared.storage.folder import FolderStorage  # imports this module

    return FolderStorage(settings.storage_dir, timeout_s=settings.storage_timeout_s, threads=requests)
