"""Bounds on request bodies, kept before a handler sees them: how large, and how slow."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import RequestTimeout, for_error
from shared.errors import FusequeueError, PayloadTooLarge

BODY_SILENCE_S = 60.0


class BodyLimits:
    """ASGI middleware: a body may have `caps[path]` bytes (None: any number), `default_bytes` on other paths."""

    def __init__(self, app: ASGIApp, *, default_bytes: int, caps: Mapping[str, int | None]) -> None:
        self._app = app
        self._default_bytes = default_bytes
        self._caps = caps

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        cap = self._caps.get(scope["path"], self._default_bytes)
        announced = Headers(scope=scope).get("content-length", "")
        if cap is not None and announced.isdecimal() and (len(announced) > 18 or int(announced) > cap):
            # Answered before the body is read; the server throws the rest away.
            await for_error(scope, _too_large(cap))(scope, receive, send)
            return
        await self._app(scope, _Body(receive, cap).receive, send)


class _Body:
    """The receiving side of one request."""

    def __init__(self, receive: Receive, cap: int | None) -> None:
        self._receive = receive
        self._cap = cap
        self._seen = 0
        self._complete = False

    async def receive(self) -> Message:
        if self._complete:  # what is waited for now is the client's leaving
            return await self._receive()
        try:
            async with asyncio.timeout(BODY_SILENCE_S):
                message = await self._receive()
        except TimeoutError:
            raise RequestTimeout(f"no byte of the body came for {BODY_SILENCE_S:.0f} s") from None
        if message["type"] == "http.request":
            self._seen += len(message.get("body", b""))
            self._complete = not message.get("more_body", False)
            if self._cap is not None and self._seen > self._cap:
                raise _too_large(self._cap)
        return message


def _too_large(cap: int) -> FusequeueError:
    return PayloadTooLarge(f"the body is larger than {cap} bytes; pictures go to POST /v1/inputs", param="body")
