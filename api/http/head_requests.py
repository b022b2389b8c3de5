"""HEAD on what has no HEAD of its own: the response of GET, of all and not of a range, without its body."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_OF_GET = (b"range", b"if-range")
_OWN = ("method", "headers")


class HeadRequests:
    """ASGI middleware. `own` are the paths with a HEAD of their own, which reads less than their GET.

    A stream ends after its head: it is told that the client is gone.
    """

    def __init__(self, app: ASGIApp, *, own: Sequence[re.Pattern[str]]) -> None:
        self._app = app
        self._own = own

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_head = scope["type"] == "http" and scope["method"] == "HEAD"
        if not is_head or any(path.match(scope["path"]) for path in self._own):
            await self._app(scope, receive, send)
            return
        await _Head(scope, receive, send).respond(self._app)


class _Head:
    """One request. `scope` stays HEAD for the server, which counts the bytes of a body; it gets what routes write."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        headers = [header for header in scope.get("headers", ()) if header[0] not in _OF_GET]
        self._read: Scope = {**scope, "method": "GET", "headers": headers}
        self._receive = receive
        self._send = send
        self._responded = asyncio.Event()

    async def respond(self, app: ASGIApp) -> None:
        try:
            await app(self._read, self._next, self._respond)
        finally:
            self._copy_scope()

    async def _next(self) -> Message:
        """Return the next message of the client, or that it is gone as soon as the response has begun."""
        message, responded = asyncio.ensure_future(self._receive()), asyncio.ensure_future(self._responded.wait())
        try:
            await asyncio.wait((message, responded), return_when=asyncio.FIRST_COMPLETED)
            return {"type": "http.disconnect"} if responded.done() else message.result()
        finally:
            message.cancel()
            responded.cancel()

    def _copy_scope(self) -> None:
        self._scope.update({name: value for name, value in self._read.items() if name not in _OWN})

    async def _respond(self, message: Message) -> None:
        self._copy_scope()
        if message["type"] != "http.response.start":
            return
        await self._send(message)
        await self._send({"type": "http.response.body", "body": b""})
        self._responded.set()
