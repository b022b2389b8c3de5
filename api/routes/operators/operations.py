"""Routes for operators: queues, workers, and the number of workers wanted."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field

from api.context import METRICS_SCOPE, ServicesDep
from api.http.lists import known_parameters
from api.http.openapi import problems
from shared.autoscaling import Fleet, ReadyTimes, Targets, wanted_workers
from shared.config.settings import Settings
from shared.errors import NotFound
from shared.queue import QueueDepth, WorkerInfo

router = APIRouter(prefix="/v1", tags=["operations"])
scale_router = APIRouter(prefix="/v1", tags=["operations"], dependencies=[METRICS_SCOPE])


class QueueList(BaseModel):
    """Queued and running jobs by signature, the longest queues first."""

    object: Literal["list"] = "list"
    data: list[QueueDepth]
    waiting_jobs: int = Field(description="Jobs for later, of all signatures; `data` does not have them.")
    workers: int = Field(description="Live workers.")


class WorkerList(BaseModel):
    """Live workers."""

    object: Literal["list"] = "list"
    data: list[WorkerInfo]


class ScaleObject(BaseModel):
    """The number of workers wanted, the figures behind it, and the reasons; for autoscalers."""

    namespace: str
    wanted: int = Field(
        description="Workers that let queued jobs start within `target_wait_s`, or `start_s` if that is longer, and "
        "end bulk jobs within their windows; never fewer than those with interactive or standard jobs."
    )
    alive: int = Field(description="Workers that are ready or starting.")
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


@router.get("/queues", responses=problems(422, 503), dependencies=[known_parameters()])
async def list_queues(services: ServicesDep) -> QueueList:
    """List the signatures with jobs: numbers of queued and running jobs, age of the oldest, estimated time."""
    workers = await services.queue.workers.all()
    depths = [
        depth if any(worker.serves(depth.model) for worker in workers) else replace(depth, eta_s=None)
        for depth in await services.queue.workers.queue_depths()
    ]
    waiting_jobs = await services.queue.maintenance.waiting_jobs()
    return QueueList(data=depths, waiting_jobs=waiting_jobs, workers=len(workers))


@router.get("/workers", responses=problems(422, 503), dependencies=[known_parameters()])
async def list_workers(services: ServicesDep) -> WorkerList:
    """List the live workers."""
    return WorkerList(data=await services.queue.workers.all())


@scale_router.get("/scale/{namespace}", responses=problems(404, 503))
async def get_scale(namespace: str, services: ServicesDep) -> ScaleObject:
    """Return the number of workers that a namespace wants now. This API serves one namespace."""
    if namespace != services.settings.namespace:
        raise NotFound(f"this API serves the namespace {services.settings.namespace!r}", param="namespace")
    workers = services.queue.workers
    fleet = fleet_of(await workers.all(), await workers.mean_start_s())
    backlog = await workers.backlog(await workers.load(), services.catalog.expected_s)
    wanted = wanted_workers(backlog, fleet, targets_of(services.settings))
    return ScaleObject(
        namespace=namespace,
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
        queued=sum(load.queued_slots + load.bulk_slots for load in backlog.loads),
        running=sum(load.running_slots for load in backlog.loads),
        reasons=wanted.reasons,
    )


def fleet_of(workers: Sequence[WorkerInfo], start_s: float) -> Fleet:
    """Return the figures of the workers; those that drain or can load no model do not count."""
    alive = [worker for worker in workers if worker.state in ("starting", "ready")]
    running = sum(worker.running_jobs for worker in alive)
    ready: dict[str, list[float]] = {}
    for worker in alive:
        for model in worker.models:
            if worker.state == "starting" or worker.serves(model):
                ready.setdefault(model, []).extend(() if worker.ready_s is None else (worker.ready_s,))
    return Fleet(
        alive=len(alive),
        busy=sum(worker.running_jobs > 0 for worker in alive),
        urgent=sum(worker.running_jobs > worker.bulk_jobs for worker in alive),
        starting=sum(worker.state == "starting" for worker in alive),
        unavailable=sum(worker.state == "unavailable" for worker in workers),
        serving={model: ReadyTimes(max(times, default=0.0), min(times, default=0.0)) for model, times in ready.items()},
        bulk_part=sum(worker.bulk_jobs for worker in alive) / running if running else 0.0,
        start_s=start_s,
    )


def targets_of(settings: Settings) -> Targets:
    return Targets(settings.target_wait_s, settings.bulk_window_s)
