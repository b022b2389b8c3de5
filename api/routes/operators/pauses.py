"""Routes by which operators hold work back, and the log of what operators did."""

from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from api import strict_json
from api.context import CallerDep, ServicesDep
from api.http.lists import MAX_LIMIT, After, Limit, known_parameters
from api.http.middleware import JSON_TYPES, require_type
from api.http.openapi import problems
from api.jobs.job_object import iso
from api.jobs.request import validated
from shared.auth import tenant_name
from shared.errors import NotFound
from shared.queue.maintenance.actions import Action
from shared.queue.maintenance.pauses import MAX_REASON_CHARS, Pause, PauseKind

router = APIRouter(prefix="/v1", tags=["operations"])


class PauseReason(BaseModel):
    """Why work is paused, for other operators."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    reason: str = Field("", max_length=MAX_REASON_CHARS)


class PauseObject(BaseModel):
    """One pause. Its jobs wait in the queue; running ones run on."""

    object: Literal["pause"] = "pause"
    kind: PauseKind
    name: str = Field(description="The model or tenant; empty for everything.")
    reason: str
    paused_at: str
    key_id: str | None = Field(description="The API key that paused it.")


class PauseList(BaseModel):
    """All pauses."""

    object: Literal["list"] = "list"
    data: list[PauseObject]


class ActionObject(BaseModel):
    """What an operator did."""

    object: Literal["action"] = "action"
    id: str
    at: str
    action: str = Field(examples=["pause"])
    target: str
    count: int = Field(description="How many jobs or entries it changed.")
    detail: str
    key_id: str | None = Field(description="The API key; null for a command on Redis, and where no keys are required.")


class ActionList(BaseModel):
    """A page of the action log, newest first."""

    object: Literal["list"] = "list"
    data: list[ActionObject]
    has_more: bool
    next_cursor: str | None


_SCHEMA = {"schema": PauseReason.model_json_schema()}
_REASON: dict[str, Any] = {"requestBody": {"content": {"application/json": _SCHEMA}}}
_ERRORS = problems(400, 404, 409, 415, 422, 503)


@router.get("/pauses", responses=problems(422, 503), dependencies=[known_parameters()])
async def list_pauses(services: ServicesDep) -> PauseList:
    """List what is paused."""
    pauses = await services.queue.pauses.all()
    return PauseList(data=[_object(pause) for pause in pauses.by_name.values()])


@router.put("/pauses/all", openapi_extra=_REASON, responses=_ERRORS)
async def pause_everything(services: ServicesDep, caller: CallerDep, request: Request) -> PauseObject:
    """Start no job until `DELETE /v1/pauses/all`. Jobs are accepted and wait; running ones run on."""
    return await _pause(services, caller, PauseKind.ALL, "", await _reason(request))


@router.put("/pauses/models/{model:path}", openapi_extra=_REASON, responses=_ERRORS)
async def pause_model(model: str, services: ServicesDep, caller: CallerDep, request: Request) -> PauseObject:
    """Start no job of a model."""
    return await _pause(services, caller, PauseKind.MODEL, services.catalog.get(model).id, await _reason(request))


@router.put("/pauses/tenants/{tenant}", openapi_extra=_REASON, responses=_ERRORS)
async def pause_tenant(tenant: str, services: ServicesDep, caller: CallerDep, request: Request) -> PauseObject:
    """Start no job of a tenant."""
    return await _pause(services, caller, PauseKind.TENANT, tenant_name(tenant), await _reason(request))


@router.delete("/pauses/all", status_code=204, responses=_ERRORS)
async def resume_everything(services: ServicesDep, caller: CallerDep) -> Response:
    """End the pause of everything; those of models and tenants stay."""
    return await _resume(services, caller, PauseKind.ALL, "")


@router.delete("/pauses/models/{model:path}", status_code=204, responses=_ERRORS)
async def resume_model(model: str, services: ServicesDep, caller: CallerDep) -> Response:
    """End the pause of a model."""
    return await _resume(services, caller, PauseKind.MODEL, services.catalog.id_of(model))


@router.delete("/pauses/tenants/{tenant}", status_code=204, responses=_ERRORS)
async def resume_tenant(tenant: str, services: ServicesDep, caller: CallerDep) -> Response:
    """End the pause of a tenant."""
    return await _resume(services, caller, PauseKind.TENANT, tenant)


@router.get("/actions", responses=problems(422, 503), dependencies=[known_parameters("after", "limit")])
async def list_actions(services: ServicesDep, after: After = None, limit: Limit = 20) -> ActionList:
    """List what operators did, newest first; the last 10,000 actions are kept for 90 days."""
    entries, cursor = await services.queue.actions.page(after, min(limit, MAX_LIMIT))
    data = [
        ActionObject(
            id=entry.id,
            at=iso(entry.at_ms) or "",
            action=entry.action.name,
            target=entry.action.target,
            count=entry.action.count,
            detail=entry.action.detail,
            key_id=entry.action.key_id or None,
        )
        for entry in entries
    ]
    return ActionList(data=data, has_more=cursor is not None, next_cursor=cursor)


async def _reason(request: Request) -> str:
    """Return the reason in a body, which can be left out."""
    body = await request.body()
    if not body:
        return ""
    require_type(request, JSON_TYPES)
    return validated(PauseReason, strict_json.decode(body)).reason


async def _pause(services: ServicesDep, caller: CallerDep, kind: PauseKind, name: str, reason: str) -> PauseObject:
    queue = services.queue
    pause = Pause(kind, name, reason, await queue.now_ms(), caller.key_id)
    await queue.pauses.set(pause)
    await queue.actions.record(Action("pause", _target(kind, name), caller.key_id or "", detail=reason))
    return _object(pause)


async def _resume(services: ServicesDep, caller: CallerDep, kind: PauseKind, name: str) -> Response:
    if not await services.queue.pauses.end(kind, name):
        what = "the service as a whole" if kind is PauseKind.ALL else _target(kind, name)[:200]
        raise NotFound(f"{what} is not paused", param="name")
    await services.queue.actions.record(Action("resume", _target(kind, name), caller.key_id or ""))
    return Response(status_code=204)


def _target(kind: PauseKind, name: str) -> str:
    return "everything" if kind is PauseKind.ALL else f"{kind.value} {name}"


def _object(pause: Pause) -> PauseObject:
    return PauseObject(
        kind=pause.kind,
        name=pause.name,
        reason=pause.reason,
        paused_at=iso(pause.paused_at_ms) or "",
        key_id=pause.key_id,
    )
