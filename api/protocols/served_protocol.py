"""What one protocol adds to the API."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fastapi import APIRouter

from api.errors import ErrorForm
from api.http.direct_routes import DirectRoute
from shared.config.catalog import Catalog
from shared.config.settings import Settings


@dataclass(frozen=True, eq=False)
class ServedProtocol:
    """The routes of a protocol, and what the app needs to know about them.

    Requests to `routers` need the scope for jobs; those to `signed_routers` have signed URLs, which these check.
    `error_form` is that of all errors of its paths. `body_limits` are the largest bodies of paths, in bytes, where they
    differ from the default; `*` stands for any part of a path. `request_headers` are those that its clients send from
    pages of other origins.
    """

    routers: tuple[APIRouter, ...]
    error_form: ErrorForm
    body_limits: Callable[[Settings, Catalog], Mapping[str, int]]
    signed_routers: tuple[APIRouter, ...] = ()
    direct_routes: tuple[DirectRoute, ...] = ()
    request_headers: tuple[str, ...] = ()
