"""Routes that skip FastAPI, which takes longer to resolve their parameters than they take to respond."""

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from api.errors import HANDLERS


@dataclass(frozen=True)
class DirectRoute:
    """A route of FastAPI, and the function that responds to its requests without a query; `path` has no prefix."""

    route: APIRoute
    path: re.Pattern[str]
    respond: Callable[[Request], Awaitable[Response]]

    def matches(self, scope: Scope) -> bool:
        """Return whether a request can be responded to directly."""
        return scope["method"] in (self.route.methods or ()) and self.path.fullmatch(scope["path"]) is not None


def route_of(router: APIRouter, endpoint: Callable[..., object]) -> APIRoute:
    """Return the route of an endpoint."""
    return next(route for route in router.routes if isinstance(route, APIRoute) and route.endpoint is endpoint)


class DirectRoutes:
    """ASGI middleware: responds to requests that match a direct route, with the same error responses as FastAPI's."""

    def __init__(self, app: ASGIApp, *, routes: tuple[DirectRoute, ...]) -> None:
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        direct = self._match(scope)
        if direct is None:
            await self._app(scope, receive, send)
            return
        scope["route"], scope["endpoint"] = direct.route, direct.route.endpoint
        request = Request(scope, receive, send)
        try:
            response = await direct.respond(request)
        except Exception as error:
            handler = next((HANDLERS[kind] for kind in type(error).__mro__ if kind in HANDLERS), None)
            if handler is None:
                raise
            response = await handler(request, error)
        await response(scope, receive, send)

    def _match(self, scope: Scope) -> DirectRoute | None:
        if scope["type"] != "http" or scope["query_string"] or scope.get("root_path"):
            return None
        return next((direct for direct in self._routes if direct.matches(scope)), None)
