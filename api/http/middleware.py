"""Middleware: request ids, a log line and metrics for each request, errors that nothing handles, and body limits."""

import asyncio
import re
import time
from collections.abc import Collection, Mapping
from functools import lru_cache

import structlog
from fastapi import Request
from prometheus_client import Counter, Histogram
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import RequestTimeout, UnsupportedMediaType, for_error, problem
from shared.errors import FusequeueError, PayloadTooLarge
from shared.runtime import metrics
from shared.runtime.clock import new_id

log = structlog.get_logger()

BODY_TIMEOUT_S = 60.0
RELEASE_KEY = "fusequeue.release"
"""Of the scope: a list of what to call at the end of the request."""

JSON_TYPES = frozenset(("application/json",))
NDJSON_TYPES = frozenset(("application/x-ndjson", "application/ndjson", "application/jsonl", "application/json-lines"))
UPLOAD_TYPES = frozenset(("multipart/form-data",))
URLENCODED_TYPES = frozenset(("application/x-www-form-urlencoded",))
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_METHODS = frozenset(("GET", "HEAD", "POST", "DELETE", "OPTIONS", "PUT", "PATCH"))
_READ_METHODS = frozenset(("GET", "HEAD"))


class RequestLog:
    """ASGI middleware. It keeps a client's `x-request-id` that is short and plain, and creates one otherwise."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client_id = Headers(scope=scope).get("x-request-id", "")
        scope["request_id"] = client_id if _REQUEST_ID.fullmatch(client_id) else new_id("req")
        response = _Response(send, scope)
        started = time.perf_counter()
        with (
            structlog.contextvars.bound_contextvars(request_id=scope["request_id"]),
            metrics.http_in_flight.track_inprogress(),
        ):
            try:
                await self._app(scope, receive, response.send)
            except Exception:
                if response.status is not None:  # too late for an error response: the server closes the connection
                    raise
                log.exception("request_crashed", method=scope["method"], path=scope["path"][:200])
                await problem(scope, "internal_error", "")(scope, receive, response.send)
            finally:
                for release in scope.get(RELEASE_KEY, ()):
                    release()
                _record(scope, response.status, time.perf_counter() - started)


class _Response:
    """The sending side of one request: adds the request id and the rate limit, and keeps the status."""

    def __init__(self, send: Send, scope: Scope) -> None:
        self._send = send
        self._scope = scope
        self.status: int | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = {"x-request-id": self._scope["request_id"], **self._scope.get("rate_headers", {})}
            encoded = [(name.lower().encode("ascii"), value.encode("ascii")) for name, value in headers.items()]
            message["headers"] = [*message.get("headers", ()), *encoded]
        await self._send(message)


def _record(scope: Scope, status: int | None, seconds: float) -> None:
    route = getattr(scope.get("route"), "path", "none")
    method = scope["method"] if scope["method"] in _METHODS else "other"
    responses, times = _metrics_of(method, route, status)
    responses.inc()
    times.observe(seconds)
    successful_read = scope["method"] in _READ_METHODS and status is not None and status < 400
    (log.debug if successful_read else log.info)(
        "request", method=method, route=route, status=status, duration_ms=round(seconds * 1000, 1)
    )


@lru_cache(maxsize=1024)
def _metrics_of(method: str, route: str, status: int | None) -> tuple[Counter, Histogram]:
    """Return the metrics of such responses."""
    responses = metrics.http_requests.labels(method, route, str(status or "cut"))
    return responses, metrics.http_request_seconds.labels(route)


def require_type(request: Request, allowed: Collection[str]) -> None:
    """Raise `UnsupportedMediaType` unless the body's content type is one of `allowed`, and the body not compressed.

    A body without a type is refused too: pages of other sites can send one without a CORS preflight.
    """
    coding = request.headers.get("content-encoding", "").strip()
    if coding.lower() not in ("", "identity"):
        message = f"send the body as it is, without Content-Encoding: {coding[:40]}"
        raise UnsupportedMediaType(message, param="Content-Encoding")
    content_type = content_type_of(request)
    if content_type not in allowed:
        types = " or ".join(sorted(allowed))
        raise UnsupportedMediaType(
            f"send the body as {types}, not as {content_type[:100] or 'nothing'}", param="Content-Type"
        )


def content_type_of(request: Request) -> str:
    """Return the body's content type without its parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


class BodyCaps:
    """The most bytes of a body by path (None: unlimited), `default_bytes` on other paths.

    One `*` of a path stands for any text.
    """

    def __init__(self, default_bytes: int, caps: Mapping[str, int | None]) -> None:
        self._default_bytes = default_bytes
        self.replace(caps)

    def replace(self, caps: Mapping[str, int | None]) -> None:
        """Replace those of all paths: some follow from the models."""
        self._caps = {path: cap for path, cap in caps.items() if "*" not in path}
        self._patterns = [(path.split("*"), cap) for path, cap in caps.items() if "*" in path]

    def of(self, path: str) -> int | None:
        for (start, end), cap in self._patterns:
            if path.startswith(start) and path.endswith(end):
                return cap
        return self._caps.get(path, self._default_bytes)


class BodyLimits:
    """ASGI middleware: a body has at most the bytes that `caps` says of its path."""

    def __init__(self, app: ASGIApp, *, caps: BodyCaps) -> None:
        self._app = app
        self._caps = caps

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        cap = self._caps.of(scope["path"])
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
