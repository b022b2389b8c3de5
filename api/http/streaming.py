"""Answers that are sent piece by piece, to clients that may stop reading or leave."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from functools import partial

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from shared.errors import NotFound
from shared.runtime.cancellation import canceled

SEND_STALL_S = 60.0


class StreamedResponse(Response):
    """Sends what `pieces` yields, and closes it when all is sent, the client has left or does not read any more."""

    def __init__(
        self,
        pieces: AsyncGenerator[bytes],
        *,
        status_code: int = 200,
        media_type: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.pieces = pieces
        self.status_code = status_code
        self.media_type = media_type
        self.background = None
        self.init_headers(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send_all(send))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            await canceled((sending, leaving))
            await self.pieces.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with contextlib.aclosing(self.pieces):
            async for piece in self.pieces:
                await send_patiently(send, {"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class TimedResponse(Response):
    """An answer in one piece, given up where the client does not read it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__(scope, receive, partial(send_patiently, send))


async def send_patiently(send: Send, message: Message) -> None:
    """Send, or raise `TimeoutError` when the client has not read for `SEND_STALL_S`."""
    async with asyncio.timeout(SEND_STALL_S):
        await send(message)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def opened(pieces: AsyncIterator[bytes], *, param: str) -> AsyncGenerator[bytes]:
    """Return `pieces` with the first one read, so that what is missing or away can still be told by a status."""
    with there(param):
        first = await anext(pieces, b"")

    async def whole() -> AsyncGenerator[bytes]:
        yield first
        async for piece in pieces:
            yield piece

    return whole()


@contextlib.contextmanager
def there(param: str) -> Iterator[None]:
    """Raise `NotFound` in words for a client where an object is not in storage any more."""
    try:
        yield
    except NotFound:
        raise NotFound("it is no longer in storage", param=param) from None
