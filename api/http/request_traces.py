"""Middleware: a span for each request that can change something, in the trace of its `traceparent`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import structlog
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared.runtime import tracing
from shared.runtime.tracing import Attributes, SpanKind, SpanStart

if TYPE_CHECKING:
    from shared.runtime.tracing.otel import OpenSpan

_UNTRACED = frozenset(("GET", "HEAD", "OPTIONS"))  # polls and streams would be most of all spans


class RequestTraces:
    """ASGI middleware, the outermost one: log lines of the request have its `trace_id`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in _UNTRACED:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        parent = tracing.accepted(headers.getlist("traceparent"), headers.getlist("tracestate"))
        status: list[int] = []

        async def send_noting_status(message: Message) -> None:
            if message["type"] == "http.response.start":
                status.append(message["status"])
            await send(message)

        with tracing.spanning(SpanStart("request", SpanKind.SERVER, parent)) as span:
            if span is None:
                await self._app(scope, receive, send)
                return
            with structlog.contextvars.bound_contextvars(trace_id=span.context.trace_id):
                try:
                    await self._app(scope, receive, send_noting_status)
                finally:
                    _describe(span, scope, status[0] if status else None)


def _describe(span: "OpenSpan", scope: Mapping[str, Any], status: int | None) -> None:
    """Set what is known at the end: the route without ids, the status, the request's id and its tenant."""
    route = getattr(scope.get("route"), "path", None)
    span.rename(f"{scope['method']} {route}" if route else "unknown route")
    attributes: Attributes = {
        "http.request.method": scope["method"],
        "http.route": route,
        "http.response.status_code": status,
        "fusequeue.request.id": scope.get("request_id"),
        "fusequeue.tenant": scope.get("tenant"),
    }
    span.set(attributes)
    if status is None or status >= 500:
        span.fail(f"status {status}" if status else "no response")
