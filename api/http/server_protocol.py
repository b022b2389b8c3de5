"""HTTP/1.1 on one connection: uvicorn's protocol on llhttp, with limits on what one client can occupy.

uvicorn on httptools has none on the head of a request, on the time it takes, on requests sent in advance, and on
clients that do not read; and it reads on after a response that came before the end of the request.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from functools import partial
from typing import Any, cast

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from api.errors import UNAVAILABLE_RETRY_S, closing_response
from api.http.connections import Connections, Place
from api.http.request_limits import ArrivalLimits, ConnectionPhase, head_fault, overdue
from shared.runtime import metrics

PIECE_BYTES = 4096  # parsed at once: bounds what is parsed beyond a limit
MAX_HEAD_BYTES = 32 * 1024
MAX_HEADERS = 100
MAX_PIPELINED = 16
# A chunk takes five bytes more than its data, and a chunk of one byte as much time as one of a thousand.
CHUNK_OVERHEAD_BYTES = 8 * 1024
MAX_DROPPED_BYTES = 64 * 1024 * 1024  # more than the largest body but files and bulk requests
MIN_READ_BYTES = 16 * 1024
MAX_WITH_HEAD_BYTES = 64 * 1024  # a larger body is not copied to follow its head at once
_FRAMING = (b"content-length", b"transfer-encoding")


class ServerProtocol(HttpToolsProtocol):
    """One connection. `_reading` is False once it serves no further request; what the client sends then is dropped."""

    # Python shares the keys of instances with up to 30 attributes; with these, there would be 42.
    __slots__ = (
        *("_active", "_between", "_body_bytes", "_connections", "_cut", "_dropped_bytes", "_fault"),
        *("_head_bytes", "_held_head", "_holds_head", "_in_body", "_limits", "_lingering", "_place", "_progress"),
        *("_reading", "_since", "_timer", "_wire_bytes", "_written_bytes"),
    )

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        connections: Connections,
        limits: ArrivalLimits,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        # Without uvicorn's leniency: a request after one with `Connection: close` is an error.
        self.parser = httptools.HttpRequestParser(self)
        self._connections = connections
        self._limits = limits
        self._place: Place | None = None
        self._active: RequestResponseCycle | None = None
        self._fault: tuple[str, str] | None = None
        self._reading = True
        self._in_body = False
        self._between = False  # a request has ended, and no other one has begun
        self._cut = False  # something that the client has sent, or is sending, is not read
        self._lingering = False
        self._since = 0.0
        self._head_bytes = self._wire_bytes = self._body_bytes = self._dropped_bytes = self._written_bytes = 0
        self._holds_head = False
        self._held_head = b""
        self._progress = (0.0, 0)  # when the client last read, and how many bytes it had read
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = self.loop.time()
        host = self.client[0] if self.client else ""
        if self._connections.is_proxy(host):
            self._limits = self._limits.of_proxies
        place = self._connections.admit(self, host)
        if isinstance(place, str):
            self._reading = False
            self.write(closing_response("too_many_connections", place, {"Retry-After": str(UNAVAILABLE_RETRY_S)}))
            transport.close()
        else:
            self._place = place
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._place is not None:
            self._place.leave()
        if self._timer is not None:
            self._timer.cancel()
        if self._active is not None:  # uvicorn ends only the last request
            _end(self._active)
        self.pipeline.clear()
        # Break the reference cycles: Python looks for them rarely here.
        self._place = self._active = self.cycle = None  # type: ignore[assignment]

    def evict(self) -> None:
        """Close the connection at once, for another one; it has no request."""
        self.transport.abort()

    # What a request's cycle uses as its transport

    def write(self, data: bytes) -> None:
        """Send a part of a response; its head goes with its body, if that follows at once and is small."""
        self._written_bytes += len(data)
        if self._holds_head:
            self._holds_head, self._held_head = False, data
            self.loop.call_soon(self._send_head)
            return
        if self._held_head and len(data) <= MAX_WITH_HEAD_BYTES:
            data, self._held_head = self._held_head + data, b""
        self._send_head()
        self.transport.write(data)

    def hold_head(self) -> None:
        """Hold the next part, the head of a response, for its body: one system call costs 30 us less than two."""
        self._holds_head = True

    def _send_head(self) -> None:
        head, self._held_head = self._held_head, b""
        if head and not self.transport.is_closing():
            self.transport.write(head)

    def is_closing(self) -> bool:
        """Return whether nothing more can be sent."""
        return self._lingering or self.transport.is_closing()

    def close(self) -> None:
        """Close the connection; after half a request, stop sending and drop the rest for a moment.

        The client would lose the response to a reset if it were still sending.
        """
        self._send_head()
        if self.is_closing():
            return
        if not (self._cut or self._in_body):
            self.transport.close()
        else:
            self._lingering, self._reading = True, False
            if self.transport.can_write_eof():
                with suppress(OSError):  # the client has reset the connection
                    self.transport.write_eof()
            self.flow.resume_reading()
            self.loop.call_later(self._limits.linger_s, self.transport.close)
        self._watch()

    # Receiving

    def data_received(self, data: bytes) -> None:
        view = memoryview(data)
        for start in range(0, len(data), PIECE_BYTES):
            if not self._reading:
                self._drop(len(data) - start)
                return
            self._parse(view[start : start + PIECE_BYTES])
        if self._in_body:
            self._watch()

    def _drop(self, count: int) -> None:
        self._cut = True
        self._dropped_bytes += count
        if not self._lingering:
            self.flow.pause_reading()
        elif self._dropped_bytes > MAX_DROPPED_BYTES:
            self.transport.close()

    def _parse(self, piece: memoryview) -> None:
        was_in_body = self._in_body
        self._between = False
        if not was_in_body and not self._head_bytes:
            self._since = self.loop.time()
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(piece[upgrade.args[0] :])
            return
        except httptools.HttpParserError as error:
            if self._reading:
                self._fail(*(self._fault or ("bad_request", f"invalid HTTP/1.1: {error}")), reason="invalid")
            return
        if self._between:
            return
        if not self._in_body:
            self._head_bytes += len(piece)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._fail("headers_too_large", f"the head has more than {MAX_HEAD_BYTES} bytes", reason="invalid")
        elif was_in_body:
            self._wire_bytes += len(piece)
            if self._wire_bytes > 2 * self._body_bytes + CHUNK_OVERHEAD_BYTES:
                self._fail("bad_request", "the body's chunks are too small; send larger ones", reason="invalid")

    def _ignore_upgrade(self, rest: memoryview) -> None:
        """Go on after a head with `Upgrade`, which clients that offer h2c send with every request.

        llhttp takes what follows for the other protocol's. A parser that has not seen `Upgrade` reads the body; no
        other request follows it.
        """
        if self._in_body:
            framing = [name + b": " + value for name, value in self.headers if name in _FRAMING]
            self.parser = httptools.HttpRequestParser(_BodyCallbacks(self))
            self.parser.feed_data(b"\r\n".join([b"POST / HTTP/1.1", *framing, b"", b""]))
            self.cycle.keep_alive = False
        if rest:
            self._parse(rest)

    def on_message_begin(self) -> None:
        if self._reading and len(self.pipeline) >= MAX_PIPELINED:
            self._reading, self._cut = False, True
            self.pipeline[0][0].keep_alive = False  # the last one served; the client sends the others again
        if not self._reading:
            raise ConnectionAbortedError
        self._between = False
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_body:  # a trailer: uvicorn would add it to the headers
            return
        if len(self.headers) >= MAX_HEADERS:
            self._fault = ("headers_too_large", f"the head has more than {MAX_HEADERS} headers")
            raise ValueError
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        method, version = self.parser.get_method().decode("ascii"), self.parser.get_http_version()
        fault = head_fault(method, version, self.url, self.headers)
        if fault is not None:
            self._fault = ("bad_request", fault)
            raise ValueError
        super().on_headers_complete()
        self.cycle.transport = cast(asyncio.Transport, self)
        self._in_body = True
        self._since = self.loop.time()
        self._head_bytes = self._wire_bytes = self._body_bytes = 0

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() and any(name in _FRAMING for name, _ in self.headers):
            return  # llhttp ends the request at its head
        super().on_message_complete()
        self._in_body, self._between = False, True
        if not self.cycle.keep_alive:
            self._reading = False

    # Responding

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._active = cycle
        if self._place is not None:
            self._place.busy()
        super()._start_asgi_task(cycle, partial(_run, self, cycle, app))

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        self._send_head()
        if self.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif not self._reading:
            self.close()
        else:
            self._since = self.loop.time()
            self._note_idle(self.transport.get_write_buffer_size())
            self._watch()

    def _note_idle(self, unsent: int) -> None:
        """Let another connection have the place of this one, unless a part of its response is still unsent."""
        if self._place is not None and not unsent:
            self._place.idle()

    def _fail(self, code: str, detail: str, *, reason: str) -> None:
        """Refuse the request that is being received, and serve no other one."""
        metrics.http_connections_closed.labels(reason).inc()
        self._reading, self._cut = False, True
        failed = self.cycle if self._in_body else None
        if failed is not None:
            _end(failed)
        if self._active is not None and self._active is not failed and not self._active.response_complete:
            # Earlier requests get their responses, the last of them ends the connection.
            self.pipeline = deque(entry for entry in self.pipeline if entry[0] is not failed)
            (self.pipeline[0][0] if self.pipeline else self._active).keep_alive = False
            return
        if failed is None or not failed.response_started:
            self.write(closing_response(code, detail))
        self.close()

    # Time limits

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def _unset_keepalive_if_required(self) -> None:
        """Do nothing: `_check` closes idle connections."""

    def _watch(self) -> None:
        """Check the time limits from now on, until the connection waits only for its response."""
        if self._timer is None:
            self._note_progress()
            self._timer = self.loop.call_later(self._limits.check_every_s, self._check)

    def _check(self) -> None:
        self._timer = None
        now, unsent = self.loop.time(), self.transport.get_write_buffer_size()
        if unsent == 0 or self._written_bytes - unsent >= self._progress[1] + MIN_READ_BYTES:
            self._note_progress()
        elif now - self._progress[0] > self._limits.unread_s:
            metrics.http_connections_closed.labels("unread").inc()
            self.transport.abort()
            return
        phase = self._phase()
        if phase is ConnectionPhase.IDLE:
            self._note_idle(unsent)
        if phase is ConnectionPhase.BODY and self.flow.read_paused:
            self._since += self._limits.check_every_s  # the client waits for this process
        elif overdue(phase, now - self._since, self._body_bytes, self._limits):
            self._end_overdue(phase)
        if self._timer is None and (phase is not ConnectionPhase.RESPONSE or unsent):
            self._timer = self.loop.call_later(self._limits.check_every_s, self._check)

    def _phase(self) -> ConnectionPhase:
        if self.is_closing():
            return ConnectionPhase.CLOSING
        if self._in_body and self._reading:
            return ConnectionPhase.BODY
        if self._active is not None and not self._active.response_complete:
            return ConnectionPhase.RESPONSE
        return ConnectionPhase.HEAD if self._head_bytes else ConnectionPhase.IDLE

    def _end_overdue(self, phase: ConnectionPhase) -> None:
        if phase is ConnectionPhase.IDLE:
            self.transport.close()
        else:
            part = "head" if phase is ConnectionPhase.HEAD else "body"
            self._fail("request_timeout", f"the {part} of the request arrived too slowly", reason=f"slow_{part}")

    def _note_progress(self) -> None:
        self._progress = (self.loop.time(), self._written_bytes - self.transport.get_write_buffer_size())


class _BodyCallbacks:
    """The callbacks of a parser that reads one body."""

    def __init__(self, protocol: ServerProtocol) -> None:
        self.on_body = protocol.on_body
        self.on_message_complete = protocol.on_message_complete


async def _run(
    protocol: ServerProtocol, cycle: RequestResponseCycle, app: ASGIApp, scope: Scope, receive: Receive, send: Send
) -> None:
    """Run `app`; a response that begins before the request has arrived closes the connection.

    A client of HTTP/1.0 would take the framing of chunks for content: without a length, its response ends with the
    connection, for which uvicorn is told that each part is all that is left.
    """
    until_closed = False

    async def checked(message: Message) -> None:
        nonlocal until_closed
        if message["type"] == "http.response.start":
            cycle.keep_alive = cycle.keep_alive and not cycle.more_body
            protocol.hold_head()
            names = {name.lower() for name, _ in message.get("headers", ())}
            until_closed = scope["http_version"] == "1.0" and b"content-length" not in names
            if until_closed:
                cycle.chunked_encoding = False
        elif until_closed:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    await app(scope, receive, checked)


def _end(cycle: RequestResponseCycle) -> None:
    """Report a disconnect to the application."""
    if not cycle.response_complete:
        cycle.disconnected = True
        cycle.message_event.set()
