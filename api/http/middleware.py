"""The outermost middleware: request ids, a log line and metrics for each request, and errors that nothing handles."""

from __future__ import annotations

import re
import time

import structlog
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import problem
from shared.runtime import metrics
from shared.runtime.clock import new_id

log = structlog.get_logger()

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
        scope["request_id"] = _request_id(scope)
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


def _request_id(scope: Scope) -> str:
    client_id = Headers(scope=scope).get("x-request-id", "")
    return client_id if _REQUEST_ID.fullmatch(client_id) else new_id("req")


def _record(scope: Scope, status: int | None, seconds: float) -> None:
    route = getattr(scope.get("route"), "path", "none")
    method = scope["method"] if scope["method"] in _METHODS else "other"
    metrics.http_requests.labels(method, route, str(status or "cut")).inc()
    metrics.http_request_seconds.labels(route).observe(seconds)
    successful_read = scope["method"] in _READ_METHODS and status is not None and status < 400
    (log.debug if successful_read else log.info)(
        "request", method=method, route=route, status=status, duration_ms=round(seconds * 1000, 1)
    )
