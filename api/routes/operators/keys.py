"""API keys for operators: list them, without their secrets, and revoke them."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field
from starlette.responses import Response

from api.context import CallerDep, ServicesDep
from api.http.lists import MAX_LIMIT, SCANS, After, Limit, known_parameters
from api.http.openapi import problems
from api.jobs.job_object import iso
from shared.auth import PREFIX, ApiKey
from shared.errors import InvalidRequest, NotFound
from shared.queue.maintenance.actions import Action

router = APIRouter(prefix="/v1", tags=["operations"])


class KeyObject(BaseModel):
    """One API key, without its secret."""

    object: Literal["api_key"] = "api_key"
    id: str
    prefix: str = Field(description="The first part of the key.")
    tenant: str
    scopes: list[str]
    name: str = Field(description="A note.")
    state: Literal["active", "expired", "revoked"]
    created_at: str
    expires_at: str | None
    last_used_at: str | None = Field(description="To about a minute.")
    revoked_at: str | None


class KeyList(BaseModel):
    """A page of keys, newest first. Revoked and expired ones are listed for 30 days."""

    object: Literal["list"] = "list"
    data: list[KeyObject]
    has_more: bool
    next_cursor: str | None


Tenant = Annotated[str | None, Query(max_length=64, description="Only keys of this tenant.")]


@router.get("/keys", responses=problems(422, 503), dependencies=[known_parameters("tenant", "after", "limit")])
async def list_keys(
    caller: CallerDep, services: ServicesDep, tenant: Tenant = None, after: After = None, limit: Limit = 20
) -> KeyList:
    """List API keys, newest first."""
    limit = min(limit, MAX_LIMIT)
    async with SCANS.turn(caller.tenant, 1):
        keys = [key for key in reversed(await services.queue.api_keys.all()) if tenant in (None, key.tenant)]
    begin = 0 if after is None else 1 + next((at for at, key in enumerate(keys) if key.id == after), len(keys))
    if begin > len(keys):
        raise InvalidRequest("after: not a cursor of this list; pass the `next_cursor` of a page", param="after")
    page = keys[begin : begin + limit]
    has_more = begin + limit < len(keys)
    return KeyList(
        data=[key_object(key) for key in page], has_more=has_more, next_cursor=page[-1].id if has_more else None
    )


@router.delete("/keys/{key_id}", status_code=204, responses=problems(404, 503))
async def revoke_key(key_id: str, caller: CallerDep, services: ServicesDep) -> Response:
    """Revoke a key, by its id or prefix. Every API process refuses it within two seconds; signed URLs stay valid."""
    revoked = key_id.removeprefix(PREFIX)
    if not await services.queue.api_keys.revoke(revoked):
        raise NotFound(f"there is no API key {key_id[:20]!r}; `GET /v1/keys` lists all", param="key_id")
    await services.queue.actions.record(Action("revoke_key", f"key {revoked}", caller.key_id or ""))
    return Response(status_code=204)


def key_object(key: ApiKey) -> KeyObject:
    """Return a key as an operator reads it."""
    state: Literal["active", "expired", "revoked"]
    state = "revoked" if key.revoked_at_ms is not None else "expired" if key.expired else "active"
    return KeyObject(
        id=key.id,
        prefix=key.prefix,
        tenant=key.tenant,
        scopes=sorted(key.scopes),
        name=key.name,
        state=state,
        created_at=iso(key.created_at_ms) or "",
        expires_at=iso(key.expires_at_ms),
        last_used_at=iso(key.last_used_at_ms),
        revoked_at=iso(key.revoked_at_ms),
    )
