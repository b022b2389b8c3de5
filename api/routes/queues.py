"""What waits, and who works."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field

from api.context import ServicesDep
from api.http.openapi import problems
from shared.queue import QueueDepth, WorkerInfo

router = APIRouter(prefix="/v1", tags=["operations"])


class QueueList(BaseModel):
    """What waits and runs, signature by signature, the longest lines first."""

    object: Literal["list"] = "list"
    data: list[QueueDepth]
    workers: int = Field(description="Workers that are alive.")


class WorkerList(BaseModel):
    object: Literal["list"] = "list"
    data: list[WorkerInfo]


@router.get("/queues", responses=problems(503))
async def list_queues(services: ServicesDep) -> QueueList:
    """List the signatures that have jobs: how many wait and run, since when, and when they will be done."""
    workers = await services.queue.workers.all()
    return QueueList(data=await services.queue.workers.queue_depths(), workers=len(workers))


@router.get("/workers", responses=problems(503))
async def list_workers(services: ServicesDep) -> WorkerList:
    """List the workers that are alive."""
    return WorkerList(data=await services.queue.workers.all())
