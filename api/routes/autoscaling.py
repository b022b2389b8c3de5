"""How many workers a pool wants."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter
from pydantic import BaseModel, Field

from api.context import ServicesDep
from api.http.openapi import problems
from shared.autoscaling import Fleet, wanted_workers
from shared.errors import NotFound
from shared.queue import WorkerInfo
from shared.runtime.clock import now_ms

router = APIRouter(prefix="/v1/scale", tags=["operations"])


class ScaleObject(BaseModel):
    """The workers wanted, what that follows from, and why; for autoscalers."""

    pool: str
    wanted: int = Field(
        description="Workers that let what waits start within `target_wait_s`, or `start_s` where that is longer; "
        "never fewer than `busy`."
    )
    alive: int
    busy: int = Field(description="Workers that have jobs.")
    starting: int = Field(description="Workers that still load their models.")
    start_s: float = Field(description="Seconds that workers take to start, as they did of late; 0: not known.")
    target_wait_s: float
    oldest_wait_s: float
    backlog_s: float = Field(description="GPU-seconds that wait and run, counted as fused.")
    waiting_s: float
    running_s: float
    waiting: int = Field(description="Pictures that wait.")
    running: int = Field(description="Jobs that run.")
    reasons: tuple[str, ...]


@router.get("/{pool}", responses=problems(404, 503))
async def scale(pool: str, services: ServicesDep) -> ScaleObject:
    """Tell how many workers the pool wants now. A pool is a namespace; this API serves one."""
    if pool != services.settings.namespace:
        raise NotFound(f"this API serves the pool {services.settings.namespace!r}", param="pool")
    fleet = fleet_of(await services.queue.workers.all(), await services.queue.workers.mean_start_s())
    target_s = services.settings.target_wait_s
    lines = await services.queue.workers.signature_loads()
    found = wanted_workers(lines, fleet, target_s)
    return ScaleObject(
        pool=pool,
        wanted=found.wanted,
        alive=fleet.alive,
        busy=fleet.busy,
        starting=fleet.starting,
        start_s=round(fleet.start_s, 3),
        target_wait_s=target_s,
        oldest_wait_s=round(found.oldest_wait_s, 3),
        backlog_s=round(found.queued_s + found.running_s, 3),
        waiting_s=round(found.queued_s, 3),
        running_s=round(found.running_s, 3),
        waiting=sum(line.queued_slots for line in lines),
        running=sum(line.running_slots for line in lines),
        reasons=found.reasons,
    )


def fleet_of(workers: Sequence[WorkerInfo], start_s: float) -> Fleet:
    """Return what the workers of a pool come to; those that are leaving do not count."""
    alive = [worker for worker in workers if worker.state != "draining"]
    now = now_ms()
    return Fleet(
        alive=len(alive),
        busy=sum(worker.running_jobs > 0 for worker in alive),
        starting=sum(worker.state == "starting" for worker in alive),
        settled_s=min(
            (max(0, now - worker.ready_at_ms) / 1000 for worker in alive if worker.ready_at_ms), default=None
        ),
        start_s=start_s,
    )
