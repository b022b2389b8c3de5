"""Usage of the caller's tenant, or of all tenants for operators: device seconds, steps, outputs and ended jobs."""

from datetime import date, timedelta
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from api.context import CallerDep, ServicesDep
from api.http.lists import MAX_LIMIT, SCANS, After, Limit, known_parameters
from api.http.openapi import problems
from shared.auth import Scope, tenant_name
from shared.errors import InvalidRequest
from shared.queue.maintenance.tenant_usage import GROUPS, MAX_DAYS, UsageGroup, UsageQuery, UsageRow

router = APIRouter(prefix="/v1", tags=["usage"])

DEFAULT_DAYS = 30
ALL_TENANTS = "*"
EARLIEST = date(2000, 1, 1)


class UsageListQuery(BaseModel):
    """Filters, division and paging of usage."""

    first: date | None = Field(
        None, alias="from", ge=EARLIEST, description="First day (UTC). Unset: 29 days before the last."
    )
    last: date | None = Field(None, alias="to", ge=EARLIEST, description="Last day (UTC), included. Unset: today.")
    tenant: str | None = Field(
        None, max_length=64, description="Whose usage; `*`: of all tenants. Others than the key's own need `admin`."
    )
    model: str | None = Field(None, max_length=128)
    group_by: str = Field(
        "day,tenant,model",
        max_length=64,
        description="By what rows are divided: any of day, tenant, model, comma-separated, or `none` for one row.",
    )
    after: After = None
    limit: Limit = 20


class EndedJobs(BaseModel):
    """Jobs by their end, those that never ran included."""

    succeeded: int
    failed: int
    canceled: int
    expired: int


class UsageObject(BaseModel):
    """What jobs have used. Runs count on the day of their end, by Redis' clock."""

    object: Literal["usage"] = "usage"
    day: str | None = Field(description="UTC; null unless rows are divided by day.", examples=["2026-01-31"])
    tenant: str | None = Field(description="Null unless rows are divided by tenant.")
    model: str | None = Field(description="Null unless rows are divided by model.")
    device_seconds: float = Field(
        description="Device time of all runs, those that failed, were canceled or released included. A forward's time "
        "is divided by its images."
    )
    jobs: EndedJobs
    images: int = Field(description="Images of succeeded jobs.")
    videos: int = Field(description="Videos of succeeded jobs.")
    output_bytes: int = Field(description="Bytes of those files.")
    steps: int = Field(description="Denoising steps computed, over all images.")
    skipped_steps: int = Field(description="Denoising steps that step caching answered without a forward.")


class UsageList(BaseModel):
    """A page of usage, in the order of day, tenant and model."""

    object: Literal["list"] = "list"
    data: list[UsageObject]
    has_more: bool
    next_cursor: str | None


_PARAMETERS = known_parameters(*(field.alias or name for name, field in UsageListQuery.model_fields.items()))


@router.get("/usage", responses=problems(401, 403, 422, 503), dependencies=[_PARAMETERS])
async def list_usage(caller: CallerDep, services: ServicesDep, query: Annotated[UsageListQuery, Query()]) -> UsageList:
    """List usage by day, tenant and model. A key reads its own tenant's; one with the scope `admin` every tenant's."""
    own = query.tenant in (None, caller.tenant)
    caller.require(*((Scope.JOBS_READ, Scope.ADMIN) if own else (Scope.ADMIN,)))
    usage = services.queue.usage
    last = query.last or await usage.today()
    first = query.first or last - timedelta(days=DEFAULT_DAYS - 1)
    model = None if query.model is None else services.catalog.id_of(query.model)
    wanted = UsageQuery(first, last, _tenant(query.tenant, caller.tenant), model, _groups(query.group_by))
    if not 0 <= (last - first).days < MAX_DAYS:
        raise InvalidRequest(f"from: {first} to {last} must be 1 to {MAX_DAYS} days; send more requests", param="from")
    async with SCANS.turn(caller.tenant, 1):
        rows, cursor = await usage.page(wanted, query.after, min(query.limit, MAX_LIMIT))
    return UsageList(data=[usage_object(row) for row in rows], has_more=cursor is not None, next_cursor=cursor)


def usage_object(row: UsageRow) -> UsageObject:
    """Return a row as the client reads it."""
    sums = row.sum
    jobs = EndedJobs(succeeded=sums.succeeded, failed=sums.failed, canceled=sums.canceled, expired=sums.expired)
    return UsageObject(
        day=row.day,
        tenant=row.tenant,
        model=row.model,
        device_seconds=sums.device_seconds,
        jobs=jobs,
        images=sums.images,
        videos=sums.videos,
        output_bytes=sums.output_bytes,
        steps=sums.steps,
        skipped_steps=sums.skipped_steps,
    )


def _tenant(named: str | None, own: str) -> str | None:
    """Return whose usage is meant, None for all tenants."""
    if named == ALL_TENANTS:
        return None
    return own if named is None else tenant_name(named)


def _groups(text: str) -> frozenset[UsageGroup]:
    names = [] if text == "none" else text.split(",")
    groups = frozenset(group for group in GROUPS if group in names)
    if len(groups) != len(names):
        raise InvalidRequest(
            f"group_by: {text!r} must be `none`, or some of {', '.join(GROUPS)}, comma-separated", param="group_by"
        )
    return groups
