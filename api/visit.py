"""One request's surroundings: whose it is, by what address it came, and the parts that answer it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Query, Request

from api.context import Services, ServicesDep
from api.signed_urls import Signer
from api.tenancy import Asks, caller
from shared.auth import Scope
from shared.runtime.clock import now_ms

Sign = Callable[[str, int], str]


@dataclass(frozen=True)
class RequestContext:
    """`base_url` is `scheme://host[:port]` without a slash at its end: what the URLs that we tell begin with.

    It is the configured one, else what the client itself spoke to; forwarded headers count only from the proxies
    that the settings trust (the server applies them). `sign` gives what a picture's URL (of job and index) needs to be
    fetched without a key.
    """

    tenant: str
    base_url: str
    services: Services
    sign: Sign


async def request_context(request: Request, asks: Asks, services: ServicesDep) -> RequestContext:
    """Return the surroundings of `request`."""
    signer = await services.authenticator.signer() if asks.keyed else None
    return RequestContext(asks.tenant, _base_url(request, services), services, _sign(signer))


async def signed_url_context(
    request: Request,
    job_id: str,
    index: int,
    services: ServicesDep,
    expires: Annotated[int | None, Query(description="As the job's record has it.")] = None,
    signature: Annotated[str | None, Query(max_length=128, description="Stands for a key until `expires`.")] = None,
) -> RequestContext:
    """Return the surroundings of a request for a picture, which a signed URL lets in without a key."""
    if signature is None:
        asks = await caller(request, services)
        asks.require(Scope.JOBS_READ)
        return await request_context(request, asks, services)
    signer = await services.authenticator.signer()
    signer.check(job_id, index, expires=expires or 0, signature=signature, now_ms=now_ms())
    record = await services.queue.jobs.get(job_id)
    return RequestContext(
        "" if record is None else record.job.tenant, _base_url(request, services), services, _sign(signer)
    )


def _base_url(request: Request, services: Services) -> str:
    return (services.settings.public_url or str(request.base_url)).rstrip("/")


def _sign(signer: Signer | None) -> Sign:
    if signer is None:
        return lambda job_id, index: ""
    return lambda job_id, index: signer.query(job_id, index, now_ms())


Context = Annotated[RequestContext, Depends(request_context)]
SignedUrlContext = Annotated[RequestContext, Depends(signed_url_context)]
