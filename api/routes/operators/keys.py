"""API keys for operators: list them, without their secrets, create and revoke them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from api import strict_json
from api.context import CallerDep, ServicesDep
from api.http.lists import MAX_LIMIT, SCANS, After, Limit, known_parameters
from api.http.middleware import JSON_TYPES, require_type
from api.http.openapi import body_schema, problems, request_body
from api.jobs.job_object import iso
from api.jobs.request import validated
from shared.auth import MAX_NAME_CHARS, PREFIX, ApiKey, Scope
from shared.errors import InvalidRequest, NotFound, PermissionDenied
from shared.queue.maintenance.actions import Action

router = APIRouter(prefix="/v1", tags=["operations"])

MAX_EXPIRES_S = 100 * 366 * 86_400


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


class NewKeyObject(KeyObject):
    """A new key, with its secret."""

    key: str = Field(description="The key itself, which is stored nowhere: it is in this response only.")


class KeyRequest(BaseModel):
    """A key to create. Keys with the scopes `admin` and `keys:create` come from `fusequeue keys create` only."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tenant: str = Field(max_length=64, description="Whose jobs it accesses; it can be a new one.")
    scopes: tuple[Literal["jobs:read", "jobs:write", "metrics"], ...] = Field(min_length=1, max_length=3)
    name: str = Field("", max_length=MAX_NAME_CHARS, description="A note.")
    expires_s: int | None = Field(None, strict=True, ge=1, le=MAX_EXPIRES_S, description="Unset: it does not expire.")


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


_NEW: dict[str, Any] = request_body(
    "application/json",
    {"schema": body_schema(KeyRequest), "example": {"tenant": "acme", "scopes": ["jobs:read", "jobs:write"]}},
)


@router.post("/keys", status_code=201, openapi_extra=_NEW, responses=problems(400, 403, 409, 413, 415, 422, 503))
async def create_key(caller: CallerDep, services: ServicesDep, request: Request, response: Response) -> NewKeyObject:
    """Create a key, which is returned once. This needs a key with the scopes `admin` and `keys:create`."""
    caller.require(Scope.KEYS_CREATE)
    if not caller.has_key:
        raise PermissionDenied("the first key is created with `fusequeue keys create`; from then on keys are required")
    require_type(request, JSON_TYPES)
    body = validated(KeyRequest, strict_json.decode(await request.body()))
    queue, scopes = services.queue, frozenset(map(Scope, body.scopes))
    token, key = await queue.api_keys.create(body.tenant, scopes, name=body.name, lives_s=body.expires_s)
    detail = f"tenant {key.tenant}: {', '.join(sorted(scopes))}"
    await queue.actions.record(Action("create_key", f"key {key.id}", caller.key_id or "", detail=detail))
    response.headers["Cache-Control"] = "no-store"
    return NewKeyObject(key=token, **key_object(key).model_dump())


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
