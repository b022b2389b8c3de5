"""Tenants for operators: their limits, what they keep and use now, and their usage of the last days."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from api import strict_json
from api.context import CallerDep, ServicesDep
from api.http.lists import MAX_LIMIT, SCANS, After, Limit, known_parameters
from api.http.middleware import JSON_TYPES, require_type
from api.http.openapi import body_schema, problems, request_body
from api.jobs.request import validated
from api.routes.usage import UsageObject, usage_object
from shared.auth import Footprint, Spent, TenantLimits, TenantUse, tenant_name
from shared.config.settings import Settings
from shared.errors import InvalidRequest
from shared.queue import Queue
from shared.queue.api_keys import MAX_LIMIT as MOST
from shared.queue.maintenance.actions import Action
from shared.queue.maintenance.tenant_usage import UsageRow

router = APIRouter(prefix="/v1", tags=["operations"])


class TenantLimitsObject(BaseModel):
    """The limits that apply to a tenant, its own or those of the settings; null is unlimited."""

    requests_per_minute: int | None
    queued_jobs: int | None
    running_slots: int | None
    device_seconds_per_day: int | None
    device_seconds_per_month: int | None
    kept_jobs: int | None
    record_bytes: int | None
    stored_objects: int | None
    stored_bytes: int | None


class TenantUseObject(BaseModel):
    """What a tenant uses now, of what its limits bound."""

    queued_jobs: int = Field(description="With those that are paused or for later.")
    running_slots: int = Field(description="Images that are generated now.")
    device_seconds_per_day: float = Field(description="Of the present day (UTC).")
    device_seconds_per_month: float = Field(description="Of the present month (UTC).")
    kept_jobs: int
    record_bytes: int
    stored_objects: int
    stored_bytes: int
    recent_device_seconds: float = Field(description="Device time, halved every five minutes; it orders tenants.")


class TenantObject(BaseModel):
    """One tenant."""

    object: Literal["tenant"] = "tenant"
    id: str
    limits: TenantLimitsObject
    own_limits: list[str] = Field(description="The limits that are its own; the others are those of the settings.")
    use: TenantUseObject
    usage: UsageObject = Field(description="Its usage from `first_day` to `last_day`, over all models.")


class TenantList(BaseModel):
    """A page of tenants, by name."""

    object: Literal["list"] = "list"
    data: list[TenantObject]
    first_day: str = Field(description="Of the usage, in UTC.")
    last_day: str = Field(description="Today.")
    has_more: bool
    next_cursor: str | None


_LIMITS = tuple(TenantLimitsObject.model_fields)
OwnLimit = Annotated[int | None, Field(strict=True, ge=1, le=MOST)]


class TenantLimitsChange(BaseModel):
    """New limits of a tenant: what is left out stays, and null restores the limit of the settings."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    requests_per_minute: OwnLimit = None
    queued_jobs: OwnLimit = None
    running_slots: OwnLimit = None
    device_seconds_per_day: OwnLimit = None
    device_seconds_per_month: OwnLimit = None
    kept_jobs: OwnLimit = None
    record_bytes: OwnLimit = None
    stored_objects: OwnLimit = None
    stored_bytes: OwnLimit = None


class OwnTenantLimits(BaseModel):
    """The limits of one tenant."""

    object: Literal["tenant_limits"] = "tenant_limits"
    tenant: str
    limits: TenantLimitsObject
    own_limits: list[str] = Field(description="The limits that are its own; the others are those of the settings.")


_CHANGE: dict[str, Any] = request_body(
    "application/json", {"schema": body_schema(TenantLimitsChange), "example": {"running_slots": 8}}
)
Days = Annotated[int, Query(ge=1, le=31, description="Days of the usage, up to today (UTC).")]
Name = Annotated[str | None, Query(max_length=64, description="Only tenants whose name begins with this.")]


@router.get("/tenants", responses=problems(422, 503), dependencies=[known_parameters("name", "days", "after", "limit")])
async def list_tenants(
    caller: CallerDep, services: ServicesDep, name: Name = None, days: Days = 1, after: After = None, limit: Limit = 20
) -> TenantList:
    """List the tenants that have keys, limits or jobs: limits, what they use now, and usage of the last days."""
    queue, limit = services.queue, min(limit, MAX_LIMIT)
    async with SCANS.turn(caller.tenant, 1):
        tenants = await _Tenants.read(queue)
    names = [one for one in tenants.names() if one.startswith(name or "") and one > (after or "")]
    chosen = names[:limit]
    last = await queue.usage.today()
    first = last - timedelta(days=days - 1)
    used, queued = await queue.usage.of_tenants(first, last, chosen), await queue.api_keys.queued_jobs(chosen)
    data = [
        tenants.tenant(one, services.settings, queued[one], usage_object(UsageRow(None, one, None, used[one])))
        for one in chosen
    ]
    has_more = len(names) > limit
    return TenantList(
        data=data,
        first_day=first.isoformat(),
        last_day=last.isoformat(),
        has_more=has_more,
        next_cursor=chosen[-1] if has_more else None,
    )


@router.patch("/tenants/{tenant}/limits", openapi_extra=_CHANGE, responses=problems(400, 409, 413, 415, 422, 503))
async def change_tenant_limits(
    tenant: str, services: ServicesDep, caller: CallerDep, request: Request
) -> OwnTenantLimits:
    """Change limits of a tenant, which can be a new one. They count for the next request and the next claim."""
    name = tenant_name(tenant)
    require_type(request, JSON_TYPES)
    body = validated(TenantLimitsChange, strict_json.decode(await request.body()))
    changes = body.model_dump(include=body.model_fields_set)
    if not changes:
        raise InvalidRequest("nothing to change; send at least one limit", param=next(iter(_LIMITS)))
    own = _own(await services.queue.api_keys.change_limits(name, changes))
    detail = ", ".join(f"{limit} {'default' if value is None else value}" for limit, value in changes.items())
    await services.queue.actions.record(Action("limit", f"tenant {name}", caller.key_id or "", detail=detail))
    limits = TenantLimitsObject(**{**_default_limits(services.settings), **own})
    return OwnTenantLimits(tenant=name, limits=limits, own_limits=sorted(own))


@dataclass(frozen=True)
class _Tenants:
    """What Redis holds of all tenants, by name."""

    with_keys: frozenset[str]
    limits: dict[str, TenantLimits]
    kept: dict[str, Footprint]
    uses: dict[str, TenantUse]
    spent: dict[str, Spent]

    @classmethod
    async def read(cls, queue: Queue) -> _Tenants:
        keys = queue.api_keys
        return cls(
            with_keys=frozenset(key.tenant for key in await keys.all()),
            limits=await keys.tenant_limits(),
            kept=await keys.footprints(),
            uses=await keys.tenant_use(),
            spent=await keys.spent(),
        )

    def names(self) -> list[str]:
        return sorted({*self.with_keys, *self.limits, *self.kept, *self.uses, *self.spent})

    def tenant(self, name: str, settings: Settings, queued_jobs: int, usage: UsageObject) -> TenantObject:
        own = _own(self.limits.get(name, TenantLimits()))
        kept, use = self.kept.get(name, Footprint()), self.uses.get(name, TenantUse())
        return TenantObject(
            id=name,
            limits=TenantLimitsObject(**{**_default_limits(settings), **own}),
            own_limits=sorted(own),
            use=TenantUseObject(
                queued_jobs=queued_jobs,
                running_slots=use.running_slots,
                recent_device_seconds=use.device_seconds,
                **asdict(kept),
                **asdict(self.spent.get(name, Spent())),
            ),
            usage=usage,
        )


def _own(limits: TenantLimits) -> dict[str, int]:
    """Return the limits that are not those of the settings."""
    return {name: value for name, value in asdict(limits).items() if value is not None}


def _default_limits(settings: Settings) -> dict[str, int | None]:
    return {name: getattr(settings, f"max_{name}_per_tenant") for name in _LIMITS}
