"""Responses sent piece by piece, Server-Sent Events among them, to clients that can stop reading or disconnect."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from functools import partial

from fastapi import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from api.http.middleware import RELEASE_KEY
from shared.errors import NotFound
from shared.runtime.asyncio_tools import cancel_and_wait
from shared.runtime.shares import SharedPool
from shared.storage import CHUNK_BYTES

SEND_TIMEOUT_S = 60.0
RESPONSE_PIECES = 2
"""Of a response that its client does not read: one in the transport, and one that waits."""

END: Message = {"type": "http.response.body", "body": b"", "more_body": False}
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
        await send(END)


class TimedResponse(Response):
    """A response in one piece that ends when the client has read it, and fails when it does not."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        for message in (start, {"type": "http.response.body", "body": self.body, "more_body": True}, END):
            await send_timed(send, message)


async def send_timed(send: Send, message: Message) -> None:
    """Send, or raise `TimeoutError` when the client has not read for `SEND_TIMEOUT_S`."""
    async with asyncio.timeout(SEND_TIMEOUT_S):
        await send(message)


def count_response(request: Request, length: int, piece_bytes: int = CHUNK_BYTES) -> None:
    """Count the memory of a response with stored objects until the request ends; raises `Overloaded` without any."""
    pool: SharedPool = request.app.state.services.responses
    tenant, amount = str(request.scope.get("tenant", "")), min(length, RESPONSE_PIECES * piece_bytes)
    if not pool.take(tenant, amount):
        raise pool.refusal("too many images, videos and files of this tenant are being read at this process")
    request.scope.setdefault(RELEASE_KEY, []).append(partial(pool.release, tenant, amount))


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

    async def all_pieces(first: bytes) -> AsyncGenerator[bytes]:
        yield first
        del first  # a piece of a client that reads slowly
        async for piece in pieces:
            yield piece

    return all_pieces(first)


@contextlib.contextmanager
def stored(param: str) -> Iterator[None]:
    """Raise a `NotFound` without storage details where an object has been removed from storage."""
    try:
        yield
    except NotFound:
        raise NotFound("it is no longer in storage", param=param) from None
