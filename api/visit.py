"""One request's surroundings: whose it is, by what address it came, and the parts that answer it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from api.services import Parts, Services
from api.tenancy import Tenant


@dataclass(frozen=True)
class Visit:
    """`base_url` is `scheme://host[:port]` without a slash at its end: what the URLs that we tell begin with.

    It is the configured one, else what the client itself spoke to; forwarded headers count only from the proxies
    that the settings trust (the server applies them).
    """

    tenant: str
    base_url: str
    parts: Services


def visit(request: Request, tenant: Tenant, parts: Parts) -> Visit:
    """Return the surroundings of `request`."""
    told = parts.settings.public_url or str(request.base_url)
    return Visit(tenant, told.rstrip("/"), parts)


Here = Annotated[Visit, Depends(visit)]
