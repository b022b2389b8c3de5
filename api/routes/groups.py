"""Groups: the jobs of a tenant that have one name, with their progress."""

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field

from api.context import ReadContext
from api.http.lists import MAX_LIMIT, SCANS, After, Limit, known_parameters
from api.http.openapi import problems
from api.jobs.job_object import iso
from shared.queue.groups import Group

router = APIRouter(prefix="/v1/groups", tags=["groups"])


class GroupJobs(BaseModel):
    """Jobs by state; `queued` without those that are paused."""

    queued: int
    paused: int
    running: int
    succeeded: int
    failed: int
    canceled: int
    expired: int


class GroupObject(BaseModel):
    """The progress of the jobs that were submitted with one `group`, deleted ones excluded.

    It lasts as long as its last job is kept.
    """

    object: Literal["group"] = "group"
    name: str = Field(examples=["nightly"])
    total: int = Field(description="Jobs.")
    jobs: GroupJobs
    first_submitted_at: str | None
    last_submitted_at: str | None
    rate_per_minute: float = Field(description="Jobs that have succeeded or failed, each minute of the last five.")
    eta_s: float | None = Field(
        description="Seconds until the jobs that are not paused have ended: at that rate, or when the last one, which "
        "waits for others or for its time, is expected to; null if it is unknown, and without such jobs."
    )
    device_seconds: float = Field(description="Device time of the jobs that have ended.")


class GroupList(BaseModel):
    """A page of groups; `after=next_cursor` returns the next one."""

    object: Literal["list"] = "list"
    data: list[GroupObject]
    has_more: bool
    next_cursor: str | None


@router.get("", responses=problems(422, 503), dependencies=[known_parameters("tenant", "after", "limit")])
async def list_groups(context: ReadContext, after: After = None, limit: Limit = 20) -> GroupList:
    """List the groups, those with the latest submits first."""
    async with SCANS.turn(context.tenant, 1):
        found, cursor = await context.services.queue.groups.page(context.tenant, after, min(limit, MAX_LIMIT))
    return GroupList(data=[group_object(one) for one in found], has_more=cursor is not None, next_cursor=cursor)


@router.get("/{group}", responses=problems(404, 422, 503), dependencies=[known_parameters("tenant")])
async def get_group(group: str, context: ReadContext) -> GroupObject:
    """Read the progress of a group. `GET /v1/jobs?group=NAME` lists its jobs; `POST /v1/jobs:cancel?group=NAME`,
    `:pause`, `:resume`, `:update` and `:retry`, and `DELETE /v1/jobs?group=NAME`, change them."""
    return group_object(await context.services.queue.groups.get(context.tenant, group))


def group_object(group: Group) -> GroupObject:
    """Return a group as the client reads it."""
    return GroupObject(
        name=group.name,
        total=sum(group.jobs.values()),
        jobs=GroupJobs(**group.jobs),
        first_submitted_at=iso(group.first_submit_ms),
        last_submitted_at=iso(group.last_submit_ms),
        rate_per_minute=round(group.rate_per_minute, 3),
        eta_s=None if group.eta_s is None else round(group.eta_s, 1),
        device_seconds=round(group.device_seconds, 3),
    )
