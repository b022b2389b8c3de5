"""One request's surroundings: whose it is, by what address it came, and the parts that answer it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Query, Request

from api.context import Parts, Services
from api.signed_urls import Signer
from api.tenancy import Asks, caller
from shared.auth import Scope
from shared.runtime.clock import now_ms

Sign = Callable[[str, int], str]


@dataclass(frozen=True)
class Visit:
    """`base_url` is `scheme://host[:port]` without a slash at its end: what the URLs that we tell begin with.

    It is the configured one, else what the client itself spoke to; forwarded headers count only from the proxies
    that the settings trust (the server applies them). `sign` gives what a picture's URL (of job and index) needs to be
    fetched without a key.
    """

    tenant: str
    base_url: str
    parts: Services
    sign: Sign


async def visit(request: Request, asks: Asks, parts: Parts) -> Visit:
    """Return the surroundings of `request`."""
    signer = await parts.gate.signer() if asks.keyed else None
    return Visit(asks.tenant, _base_url(request, parts), parts, _sign(signer))


async def visit_by_url(
    request: Request,
    job_id: str,
    index: int,
    parts: Parts,
    expires: Annotated[int | None, Query(description="As the job's record has it.")] = None,
    signature: Annotated[str | None, Query(max_length=128, description="Stands for a key until `expires`.")] = None,
) -> Visit:
    """Return the surroundings of a request for a picture, which a signed URL lets in without a key."""
    if signature is None:
        asks = await caller(request, parts)
        asks.require(Scope.JOBS_READ)
        return await visit(request, asks, parts)
    signer = await parts.gate.signer()
    signer.check(job_id, index, expires=expires or 0, signature=signature, now_ms=now_ms())
    record = await parts.queue.get(job_id)
    return Visit("" if record is None else record.job.tenant, _base_url(request, parts), parts, _sign(signer))


def _base_url(request: Request, parts: Services) -> str:
    return (parts.settings.public_url or str(request.base_url)).rstrip("/")


def _sign(signer: Signer | None) -> Sign:
    if signer is None:
        return lambda job_id, index: ""
    return lambda job_id, index: signer.query(job_id, index, now_ms())


Here = Annotated[Visit, Depends(visit)]
HereByUrl = Annotated[Visit, Depends(visit_by_url)]
