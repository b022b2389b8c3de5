"""Where input pictures and results live: one contract, a folder or an S3 bucket behind it.

Keys are paths: results `jobs/{job_id}/{attempt}/{index}.{ext}`, inputs `inputs/{tenant}/{id}/{token}.{ext}`,
files `files/{tenant}/{id}/{part}.jsonl`.
Every error is `NotFound`, or `StorageUnavailable` with a message that says what to do.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from shared.config.settings import Settings
from shared.storage.object_keys import ObjectInfo, check_key

__all__ = ["ObjectInfo", "Storage", "check_key", "connect"]


class Storage(Protocol):
    """Whole objects under keys, safe to call from any number of tasks of one event loop."""

    async def put(self, key: str, data: bytes, content_type: str) -> None:
        """Write an object so that it is visible whole and durable, or not at all; replaces one of that key."""

    async def head(self, key: str) -> ObjectInfo:
        """Return what is known of an object without reading it."""

    async def read(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """Return the bytes [start, end), fewer where the object is shorter."""

    def stream(self, key: str, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        """Yield the bytes [start, end) in pieces; `NotFound` comes with the first."""

    async def delete_prefix(self, prefix: str) -> int:
        """Delete the object at `prefix` and all below it as a path, and return how many there were.

        `jobs/a` leaves `jobs/ab` alone. Safe to repeat.
        """

    async def presigned_url(self, key: str, expires_s: int) -> str | None:
        """Return a URL that reads the object without credentials, or None where there is no such thing."""

    async def check(self) -> None:
        """Raise `StorageUnavailable` unless objects can be written and deleted here."""

    async def close(self) -> None:
        """Let go of threads and connections; nothing may be called afterwards."""


def connect(settings: Settings) -> Storage:
    """Return the bucket of the settings, or their folder where no bucket is set; touches neither yet."""
    if settings.s3_bucket is not None:
        from shared.storage.s3 import S3Storage

        return S3Storage.connect(settings)
    from shared.storage.folder import FolderStorage

    return FolderStorage(settings.storage_dir, timeout_s=settings.storage_timeout_s)
