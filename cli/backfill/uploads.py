"""Files that lines of a backfill name by their paths, in place of images: uploaded once per content."""

import asyncio
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cachetools import TTLCache

from fusequeue import AsyncClient, InvalidArgument
from fusequeue.image_sources import IMAGE_FIELDS, with_references

AT_ONCE = 4  # files in memory
MAX_BYTES = 256 * 1024 * 1024  # the service has a limit of its own, 20 MiB by default
KEPT, KEPT_S = 10_000, 3_600.0  # ids of uploads: by default the service keeps one for a day after its last job

_NAMED = frozenset((*IMAGE_FIELDS, "images", "controls"))


class Uploads:
    """Uploads the files of lines; paths are relative to `folder`."""

    def __init__(self, client: AsyncClient, folder: Path) -> None:
        self._client = client
        self._folder = folder
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._uploads: TTLCache[str, asyncio.Task[str]] = TTLCache(KEPT, KEPT_S)  # by digest of the content

    async def body(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return a body with the ids of uploads in place of paths. What the Python client takes for an id or a URL is
        no path.

        Raises `InvalidArgument`, which begins with the field, for a file that cannot be read, and `RefusedError`.
        """
        return await with_references(body, self._upload) if _NAMED & body.keys() else dict(body)

    async def _upload(self, path: object) -> str:
        if not isinstance(path, str):
            raise InvalidArgument(f"{path!r:.80} is no path, id or URL, and no object that names a job")
        async with self._turns:
            try:
                digest, data = await asyncio.to_thread(_read, self._folder / path)
            except (OSError, ValueError) as error:  # a path with a NUL
                reason = getattr(error, "strerror", None) or error
                raise InvalidArgument(f"the file {path[:200]!r} cannot be read: {reason}") from None
            upload = self._uploads.get(digest)
            if upload is None:
                upload = self._uploads[digest] = asyncio.create_task(self._client.upload(data))
            try:
                return await upload
            except BaseException:
                self._uploads.pop(digest, None)
                raise


def _read(path: Path) -> tuple[str, bytes]:
    """Return the digest and the content of a file."""
    if (size := path.stat().st_size) > MAX_BYTES:
        raise ValueError(f"{size} bytes; at most {MAX_BYTES} are sent")
    if not path.is_file():  # a pipe would be read forever
        raise ValueError("it is no file")
    data = path.read_bytes()
    return hashlib.sha256(data).hexdigest(), data
