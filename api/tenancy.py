"""Whose request it is, and what it may do: the dependencies that every route but the open ones stands behind."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from api.auth import Caller, rate_headers
from api.context import ServicesDep
from api.exposure import require_own_host
from shared.auth import Scope
from shared.errors import RateLimited

_READS = frozenset(("GET", "HEAD"))


async def caller(request: Request, services: ServicesDep) -> Caller:
    """Return whose request it is, counted against its tenant's limit; raises `Unauthenticated`, `HostRefused`
    or `RateLimited`."""
    found = await services.authenticator.caller(request.headers.getlist("authorization"))
    if not found.keyed:
        require_own_host(request.url.hostname, services.settings)
    rate = await services.authenticator.admit(found)
    if rate is not None:
        request.scope["rate_headers"] = rate_headers(rate)
        if not rate.allowed:
            raise RateLimited(f"more than {rate.limit} requests in a minute", retry_after_ms=rate.retry_ms)
    return found


Asks = Annotated[Caller, Depends(caller)]


async def tenant(asks: Asks) -> str:
    """Return the tenant of the request."""
    return asks.tenant


Tenant = Annotated[str, Depends(tenant)]


async def jobs_guard(request: Request, asks: Asks) -> None:
    """Let through who may read or, by the method, write jobs."""
    asks.require(Scope.JOBS_READ if request.method in _READS else Scope.JOBS_WRITE)


async def admin_guard(asks: Asks) -> None:
    """Let through who may see what belongs to no tenant."""
    asks.require(Scope.ADMIN)


JOBS = Depends(jobs_guard)
ADMIN = Depends(admin_guard)
