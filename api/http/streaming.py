"""Responses sent piece by piece, Server-Sent Events among them, to clients that can stop reading or disconnect."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from functools import partial

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from shared.errors import NotFound
from shared.runtime.asyncio_tools import cancel_and_wait

SEND_TIMEOUT_S = 60.0
SSE_KEEPALIVE = b": keep-alive\n\n"


class StreamedResponse(Response):
    """Sends `pieces`, and closes the generator at the end, on disconnect, and when the client stops reading."""

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
        disconnect = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait({sending, disconnect}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            await cancel_and_wait((sending, disconnect))
            await self.pieces.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with contextlib.aclosing(self.pieces):
            async for piece in self.pieces:
                await send_timed(send, {"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class TimedResponse(Response):
    """A response in one piece that fails when the client does not read it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__(scope, receive, partial(send_timed, send))


async def send_timed(send: Send, message: Message) -> None:
    """Send, or raise `TimeoutError` when the client has not read for `SEND_TIMEOUT_S`."""
    async with asyncio.timeout(SEND_TIMEOUT_S):
        await send(message)


async def disconnected(receive: Receive) -> None:
    """Return when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


# Not sse-starlette: its pings run in a task of their own, but each keepalive here must first re-check the API key, in
# order with the events. Send timeouts and closing are those of all streamed responses.
def sse_response(messages: AsyncGenerator[bytes]) -> StreamedResponse:
    """Return a stream of Server-Sent Events, which proxies must not buffer."""
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamedResponse(messages, media_type="text/event-stream", headers=headers)


def sse_message(event: str, data: str, event_id: str | None = None) -> bytes:
    """Return one Server-Sent Event."""
    id_line = "" if event_id is None else f"id: {event_id}\n"
    data_lines = "".join(f"data: {line}\n" for line in data.split("\n"))
    return f"{id_line}event: {event}\n{data_lines}\n".encode()


async def with_first_read(pieces: AsyncIterator[bytes], *, param: str) -> AsyncGenerator[bytes]:
    """Return `pieces` after reading the first one, while a missing object can still be reported by the status."""
    with stored(param):
        first = await anext(pieces, b"")

    async def all_pieces() -> AsyncGenerator[bytes]:
        yield first
        async for piece in pieces:
            yield piece

    return all_pieces()


@contextlib.contextmanager
def stored(param: str) -> Iterator[None]:
    """Raise a `NotFound` without storage details where an object has been removed from storage."""
    try:
        yield
    except NotFound:
        raise NotFound("it is no longer in storage", param=param) from None
