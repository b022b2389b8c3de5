"""Limits on request bodies: their content type, size and speed."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import RequestTimeout, UnsupportedMediaType, for_error
from shared.errors import FusequeueError, PayloadTooLarge

BODY_TIMEOUT_S = 60.0
JSON_TYPES = frozenset(("application/json",))
NDJSON_TYPES = frozenset(("application/x-ndjson", "application/ndjson", "application/jsonl", "application/json-lines"))
UPLOAD_TYPES = frozenset(("multipart/form-data",))


def require_type(request: Request, allowed: Collection[str]) -> None:
    """Raise `UnsupportedMediaType` unless the body's content type is one of `allowed`.

    A body without a type is refused too: pages of other sites can send one without a CORS preflight.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type not in allowed:
        types = " or ".join(sorted(allowed))
        raise UnsupportedMediaType(
            f"send the body as {types}, not as {content_type[:100] or 'nothing'}", param="Content-Type"
        )


class BodyLimits:
    """ASGI middleware: a body has at most `caps[path]` bytes (None: unlimited), `default_bytes` on other paths."""

    def __init__(self, app: ASGIApp, *, default_bytes: int, caps: Mapping[str, int | None]) -> None:
        self._app = app
        self._default_bytes = default_bytes
        self._caps = caps

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        cap = self._caps.get(scope["path"], self._default_bytes)
        length = Headers(scope=scope).get("content-length", "")
        if cap is not None and length.isdecimal() and (len(length) > 18 or int(length) > cap):
            # Refused before the body is read; the server discards the rest.
            await for_error(scope, _too_large(cap))(scope, receive, send)
            return
        await self._app(scope, _Body(receive, cap).receive, send)


class _Body:
    """The receiving side of one request."""

    def __init__(self, receive: Receive, cap: int | None) -> None:
        self._receive = receive
        self._cap = cap
        self._received = 0
        self._complete = False

    async def receive(self) -> Message:
        if self._complete:  # the next message is the client's disconnect, which has no time limit
            return await self._receive()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                message = await self._receive()
        except TimeoutError:
            raise RequestTimeout(f"no byte of the body arrived for {BODY_TIMEOUT_S:.0f} s") from None
        if message["type"] == "http.request":
            self._received += len(message.get("body", b""))
            self._complete = not message.get("more_body", False)
            if self._cap is not None and self._received > self._cap:
                raise _too_large(self._cap)
        return message


def _too_large(cap: int) -> FusequeueError:
    return PayloadTooLarge(f"the body is larger than {cap} bytes; upload images to POST /v1/inputs", param="body")
