"""Routes for probes and Prometheus: health, readiness and metrics."""

import asyncio
import contextlib

from fastapi import APIRouter, Request
from starlette.responses import Response

from api import queue_metrics
from api.context import METRICS_SCOPE, Services, ServicesDep
from api.errors import NotReady
from api.http.openapi import problems
from api.readiness import CHECK_TIMEOUT_S
from api.routes.operators.operations import fleet_of, targets_of
from shared.auth import Footprint
from shared.autoscaling import Scale, unpaused_slots, wanted_workers
from shared.errors import FusequeueError, NotFound
from shared.queue import QueueLoad, WorkerInfo
from shared.runtime import metrics

router = APIRouter(tags=["operations"])

_SHARED_PORT = (
    "several API processes share this port, and a scrape reaches any of them; set FUSEQUEUE_API_METRICS_PORT, and "
    "scrape the port of each process"
)


@router.get("/health", include_in_schema=False)  # the path that other inference servers have
@router.get("/healthz", responses=problems())
async def get_health() -> dict[str, str]:
    """Return that the process responds; Redis and the storage are not checked."""
    return {"status": "ok"}


@router.get("/readyz", responses=problems(503))
async def get_readiness(services: ServicesDep) -> dict[str, str]:
    """Return that jobs are accepted: Redis is usable, the storage is writable, and the API is not stopping.

    `warning` says why a restart of Redis would lose jobs, which policies differ between processes, and that a changed
    models file has a fault and is not in use. An error names the part and the kind of fault; the log has addresses and
    paths. Requests share one check a second.
    """
    if reason := await unreadiness(services):
        raise NotReady(reason)
    body = {"status": "ready", "redis": "ok", "storage": "ok"}
    warnings = [f"redis: {warning}"] if (warning := services.queue.client.durability_warning) else []
    warnings += [f"{conflict.variable} differs between processes" for conflict in services.queue.policies.conflicts]
    if services.models_watch.fault is not None:
        warnings.append("models: the file has a fault; the log names it")
    return {**body, "warning": "; ".join(warnings)} if warnings else body


@router.get("/metrics", include_in_schema=False, dependencies=[METRICS_SCOPE])
async def prometheus(request: Request, services: ServicesDep) -> Response:
    """Return the metrics of this process and the current figures of the queue and the workers."""
    if request.app.state.shares_port:  # a counter of one process after that of another looks like a restart
        raise NotFound(_SHARED_PORT)
    return Response(await exposition(services), media_type=metrics.CONTENT_TYPE)


async def unreadiness(services: Services) -> str | None:
    """Return why no jobs are accepted; None when they are."""
    if services.closing.is_set():
        return "the API is stopping"
    return "; ".join(await services.readiness.faults()) or None


async def exposition(services: Services) -> bytes:
    """Return the metrics of this process, with current ones of the queue and the workers."""
    await _read_queue(services)
    return metrics.exposition()


async def _read_queue(services: Services) -> None:
    """Set the metrics of queue and workers; they are empty while Redis is unavailable, and the scrape succeeds."""
    queue = services.queue
    load = QueueLoad((), ())
    workers: list[WorkerInfo] = []
    startable: dict[str, float] = {}
    chores: dict[str, float] = {}
    scale: Scale | None = None
    dead: int | None = None
    waiting: int | None = None
    footprint: Footprint | None = None
    with contextlib.suppress(FusequeueError, TimeoutError):
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            load = await queue.workers.load()
            workers = await queue.workers.all()
            fleet = fleet_of(workers, await queue.workers.mean_start_s())
            metrics.target_wait_seconds.set(max(services.settings.target_wait_s, fleet.start_s))
            backlog = await queue.workers.backlog(load, services.catalog.expected_s)
            startable = unpaused_slots(backlog)
            scale = wanted_workers(backlog, fleet, targets_of(services.settings))
            dead = await queue.dead_letters.count()
            waiting = await queue.maintenance.waiting_jobs()
            metrics.dead_letters_added.value = await queue.dead_letters.added()
            footprint = await queue.api_keys.footprint()
            chores = await queue.maintenance.chore_ages_s()
    queue_metrics.show_load(load, startable)
    queue_metrics.show_workers(workers)
    queue_metrics.show_scale(scale, dead, waiting)
    queue_metrics.show_footprint(footprint)
    queue_metrics.show_chores(chores)
