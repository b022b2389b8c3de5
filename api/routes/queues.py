"""Routes for operators: queues, workers, and the number of workers wanted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field

from api.context import ServicesDep
from api.http.openapi import problems
from shared.autoscaling import Fleet, wanted_workers
from shared.errors import NotFound
from shared.queue import QueueDepth, WorkerInfo
from shared.runtime.clock import now_ms

router = APIRouter(prefix="/v1", tags=["operations"])


class QueueList(BaseModel):
    """Queued and running jobs by signature, the longest queues first."""

    object: Literal["list"] = "list"
    data: list[QueueDepth]
    workers: int = Field(description="Live workers.")


class WorkerList(BaseModel):
    """Live workers."""

    object: Literal["list"] = "list"
    data: list[WorkerInfo]


class ScaleObject(BaseModel):
    """The number of workers wanted, the figures behind it, and the reasons; for autoscalers."""

    pool: str
    wanted: int = Field(
        description="Workers that let queued jobs start within `target_wait_s`, or `start_s` if that is longer; "
        "never fewer than `busy`."
    )
    alive: int
    busy: int = Field(description="Workers that have jobs.")
    starting: int = Field(description="Workers that are loading their models.")
    start_s: float = Field(description="Seconds that recent workers took to start; 0 if unknown.")
    target_wait_s: float
    oldest_wait_s: float
    backlog_s: float = Field(description="GPU seconds of queued and running jobs in fused forwards.")
    queued_s: float
    running_s: float
    queued: int = Field(description="Slots of queued jobs: one per image.")
    running: int = Field(description="Slots of running jobs.")
    reasons: tuple[str, ...]


@router.get("/queues", responses=problems(503))
async def list_queues(services: ServicesDep) -> QueueList:
    """List the signatures with jobs: numbers of queued and running jobs, age of the oldest, estimated time."""
    workers = await services.queue.workers.all()
    return QueueList(data=await services.queue.workers.queue_depths(), workers=len(workers))


@router.get("/workers", responses=problems(503))
async def list_workers(services: ServicesDep) -> WorkerList:
    """List the live workers."""
    return WorkerList(data=await services.queue.workers.all())


@router.get("/scale/{pool}", responses=problems(404, 503))
async def scale(pool: str, services: ServicesDep) -> ScaleObject:
    """Return the number of workers that the pool wants now. A pool is a namespace; this API serves one."""
    if pool != services.settings.namespace:
        raise NotFound(f"this API serves the pool {services.settings.namespace!r}", param="pool")
    workers = services.queue.workers
    fleet, loads = fleet_of(await workers.all(), await workers.mean_start_s()), await workers.signature_loads()
    wanted = wanted_workers(loads, fleet, services.settings.target_wait_s)
    return ScaleObject(
        pool=pool,
        wanted=wanted.wanted,
        alive=fleet.alive,
        busy=fleet.busy,
        starting=fleet.starting,
        start_s=round(fleet.start_s, 3),
        target_wait_s=services.settings.target_wait_s,
        oldest_wait_s=round(wanted.oldest_wait_s, 3),
        backlog_s=round(wanted.queued_s + wanted.running_s, 3),
        queued_s=round(wanted.queued_s, 3),
        running_s=round(wanted.running_s, 3),
        queued=sum(load.queued_slots for load in loads),
        running=sum(load.running_slots for load in loads),
        reasons=wanted.reasons,
    )


def fleet_of(workers: Sequence[WorkerInfo], start_s: float) -> Fleet:
    """Return the figures of a pool's workers; those that drain do not count."""
    alive = [worker for worker in workers if worker.state != "draining"]
    ready_at = [worker.ready_at_ms for worker in alive if worker.ready_at_ms]
    return Fleet(
        alive=len(alive),
        busy=sum(worker.running_jobs > 0 for worker in alive),
        starting=sum(worker.state == "starting" for worker in alive),
        settled_s=None if not ready_at else max(0, now_ms() - max(ready_at)) / 1000,
        start_s=start_s,
    )
