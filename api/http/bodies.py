"""Request bodies: their share of a process's memory and of its temporary files, and multipart forms.

A body counts from its first byte to the end of its request, or until `release_body`. JSON counts in full. Of a form
only a part is ever in memory, and of bulk requests a few lines; their routes set that part with `count_at_most`.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import parse_qsl

from fastapi import HTTPException, Request
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import UnsupportedMediaType
from shared.config.settings import Settings
from shared.errors import PayloadTooLarge
from shared.runtime.shares import SharedPool

MIN_MEMORY_BYTES = 128 * 1024 * 1024
MIN_FILES_BYTES = 2 * 1024 * 1024 * 1024
LARGEST_BODIES = 4
"""Bodies of the largest size for which there is room."""

_SPOOL_BYTES = 64 * 1024  # of an uploaded file; the rest is on disk
_READ_BYTES = 1024 * 1024
_TEXT_BYTES = 1024 * 1024  # of a JSON body next to its image
_SCOPE_KEY = "fusequeue.body"


def max_json_bytes(settings: Settings) -> int:
    """Return the limit of a JSON body with an image as a data URL, the same on all routes that create one job."""
    return 4 * -(-settings.max_input_bytes // 3) + _TEXT_BYTES


class BodyShares:
    """ASGI middleware: counts the bytes of all bodies in flight, by tenant; refuses what has no room with 503.

    A request without a key counts for no tenant; bodies are read after the key was checked. `largest_json` and
    `largest_file` are the largest allowed bodies.
    """

    def __init__(self, app: ASGIApp, *, largest_json: int, largest_file: int) -> None:
        self._app = app
        self._memory = SharedPool("body_memory", max(MIN_MEMORY_BYTES, LARGEST_BODIES * largest_json))
        self._files = SharedPool("body_files", max(MIN_FILES_BYTES, LARGEST_BODIES * largest_file))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = scope[_SCOPE_KEY] = _CountedBody(scope, receive, self._memory, self._files)
        try:
            await self._app(scope, body.receive, send)
        finally:
            body.release()


class _CountedBody:
    """The receiving side of one request."""

    def __init__(self, scope: Scope, receive: Receive, memory: SharedPool, files: SharedPool) -> None:
        self._scope = scope
        self._receive = receive
        self._memory = memory
        self._files = files
        self._taken = {memory: 0, files: 0}
        self._received = 0
        self._tenant = ""
        self.memory_limit: int | None = None
        self.spools = False

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._received += len(message.get("body", b""))
            in_memory = min(self._received, self.memory_limit or self._received)
            self._take(self._memory, in_memory, "memory for request bodies")
            if self.spools:
                self._take(self._files, self._received, "disk space for uploads")
        return message

    def _take(self, pool: SharedPool, total: int, what: str) -> None:
        more = total - self._taken[pool]
        self._tenant = self._tenant or str(self._scope.get("tenant", ""))
        if more > 0 and not pool.take(self._tenant, more):
            raise pool.refusal(f"no {what} is free: {pool.size} bytes are shared by all tenants")
        self._taken[pool] = max(total, self._taken[pool])

    def release(self) -> None:
        for pool, amount in self._taken.items():
            if amount:
                pool.release(self._tenant, amount)
                self._taken[pool] = 0


def count_at_most(request: Request, memory_bytes: int, *, spools: bool = False) -> None:
    """Count at most `memory_bytes` of a body that is not kept whole; with `spools`, the rest is in temporary files."""
    body: _CountedBody = request.scope[_SCOPE_KEY]
    body.memory_limit, body.spools = memory_bytes, spools


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return the body of a request, which does not keep it; raises `PayloadTooLarge`."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise PayloadTooLarge(f"the body has more than {max_bytes} bytes; use POST /v1/inputs", param="body")
    return bytes(body)


def release_body(request: Request) -> None:
    """Count the body no longer: its handler has dropped it, and goes on."""
    body: _CountedBody = request.scope[_SCOPE_KEY]
    body.release()


@asynccontextmanager
async def read_form(
    request: Request, *, max_files: int, max_fields: int, max_text_bytes: int
) -> AsyncIterator[FormData]:
    """Yield a multipart body with at most `max_text_bytes` next to its files, which are on disk; closes them.

    A body of another type is read as a URL-encoded form, which has no files.
    """
    if not request.headers.get("content-type", "").lower().startswith("multipart/"):
        yield await _read_urlencoded(request, max_fields, max_text_bytes)
        return
    _require_utf8(request.headers["content-type"])
    count_at_most(request, max_text_bytes + max_files * _SPOOL_BYTES, spools=True)
    parser = _FormParser(
        request.headers,
        request.stream(),
        max_files=max_files,
        max_fields=max_fields,
        max_part_size=max_text_bytes,
    )
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise HTTPException(400, error.message) from error
    try:
        yield form
    finally:
        await form.close()
        release_body(request)


def _require_utf8(content_type: str) -> None:
    """Raise `UnsupportedMediaType` for a form in another encoding, which could be any codec of Python."""
    _, options = parse_options_header(content_type)
    charset = options.get(b"charset", b"utf-8").decode("latin-1")
    if charset.lower() not in ("utf-8", "utf8", "us-ascii"):
        raise UnsupportedMediaType(f"send the form in UTF-8, not with charset={charset[:40]}", param="Content-Type")


async def _read_urlencoded(request: Request, max_fields: int, max_bytes: int) -> FormData:
    raw = await read_body(request, max_bytes)
    try:
        fields = parse_qsl(raw.decode(), keep_blank_values=True, max_num_fields=max_fields, errors="strict")
        return FormData(list[tuple[str, str | UploadFile]](fields))
    except ValueError as error:
        raise HTTPException(400, f"The URL-encoded body is not valid: {error}") from error


class _FormParser(MultiPartParser):
    """Starlette's parser with a limit for the text of all parts together: its own is for each part."""

    spool_max_size = _SPOOL_BYTES
    _text_bytes = 0

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._current_part.file is None:
            self._text_bytes += end - start
            if self._text_bytes > self.max_part_size:
                raise MultiPartException(f"The text fields have more than {self.max_part_size} bytes.")
        super().on_part_data(data, start, end)


async def sha256(file: UploadFile) -> str:
    """Return the SHA-256 of an uploaded file, which is then at its start again."""
    digest = hashlib.sha256()
    while chunk := await file.read(_READ_BYTES):
        digest.update(chunk)
    await file.seek(0)
    return digest.hexdigest()
