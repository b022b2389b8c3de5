"""JSON responses that contain stored objects as base64.

The objects are read while they are sent: a response of several large images takes megabytes, and thousands of clients
that read slowly would hold as many of them.
"""

import base64
import json
import secrets
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from fastapi import Request

from api.http.streaming import StreamedResponse, count_response, with_first_read
from shared.storage import CHUNK_BYTES, Storage


class Base64Json:
    """Collects the objects of one response, in the order in which its JSON has them."""

    def __init__(self, request: Request, storage: Storage) -> None:
        self._request = request
        self._storage = storage
        self._mark = secrets.token_hex(16)  # no text of a client contains it
        self._objects: list[tuple[str, int]] = []

    def add(self, key: str, size: int) -> str:
        """Return what stands in the content for the base64 of an object of `size` bytes."""
        self._objects.append((key, size))
        return self._mark

    async def response(
        self, content: Mapping[str, Any], *, param: str, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> StreamedResponse:
        """Return the response, with the first object begun; raises `NotFound` that names `param` if it is gone, or
        `Overloaded`."""
        texts = json.dumps(content, separators=(",", ":")).encode().split(self._mark.encode())
        length = sum(map(len, texts)) + sum(4 * -(-size // 3) for _, size in self._objects)
        if self._objects:
            count_response(self._request, length, 4 * CHUNK_BYTES // 3)
        pieces = await with_first_read(self._pieces(texts), param=param)
        all_headers = {**(headers or {}), "Content-Length": str(length)}
        return StreamedResponse(pieces, status_code=status, media_type="application/json", headers=all_headers)

    async def _pieces(self, texts: list[bytes]) -> AsyncGenerator[bytes]:
        """Yield the texts and the objects between them; each text with the first piece of its object."""
        pending = b""
        for text, (key, size) in zip(texts, self._objects, strict=False):
            pending, rest = pending + text, b""
            async for chunk in self._storage.stream(key, 0, size):
                data = rest + chunk
                whole = len(data) - len(data) % 3
                yield pending + base64.b64encode(data[:whole])
                pending, rest = b"", data[whole:]
            pending += base64.b64encode(rest)
        yield pending + texts[-1]
