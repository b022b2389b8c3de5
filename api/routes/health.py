"""Whether this API is alive, and whether it can do its work."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable

from fastapi import APIRouter
from starlette.responses import Response

from api.context import ADMIN_SCOPE, Services, ServicesDep
from api.errors import NotReady
from api.http.openapi import problems
from api.routes.autoscaling import fleet_of
from shared.autoscaling import Scale, wanted_workers
from shared.errors import FusequeueError
from shared.queue import QueueDepth, WorkerInfo
from shared.runtime import metrics

router = APIRouter(tags=["operations"])

CHECK_TIMEOUT_S = 5.0


@router.get("/healthz", responses=problems())
async def alive() -> dict[str, str]:
    """Say that the process answers; it asks nothing of Redis or the storage."""
    return {"status": "ok"}


@router.get("/readyz", responses=problems(503))
async def ready(services: ServicesDep) -> dict[str, str]:
    """Say that jobs can be taken: Redis is there and usable, the storage can be written, the API is not stopping."""
    if services.closing.is_set():
        raise NotReady("the API is stopping")
    faults = await asyncio.gather(_fault("redis", services.queue.check()), _fault("storage", services.storage.check()))
    told = [fault for fault in faults if fault is not None]
    if told:
        raise NotReady("; ".join(told))
    return {"status": "ready", "redis": "ok", "storage": "ok"}


@router.get("/metrics", include_in_schema=False, dependencies=[ADMIN_SCOPE])
async def prometheus(services: ServicesDep) -> Response:
    """Return the metrics of this process, with the queue's depth and the workers' time as of now."""
    await _read_queue(services)
    return Response(metrics.exposition(), media_type=metrics.CONTENT_TYPE)


async def _fault(part: str, check: Awaitable[None]) -> str | None:
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            await check
    except FusequeueError as error:
        return f"{part}: {error.message}"
    except TimeoutError:
        return f"{part}: no answer within {CHECK_TIMEOUT_S:.0f} s"
    return None


async def _read_queue(services: Services) -> None:
    """Set the gauges of queue and workers; without Redis they are empty, and the scrape still tells the rest."""
    depths: list[QueueDepth] = []
    workers: list[WorkerInfo] = []
    scale: Scale | None = None
    dead: int | None = None
    with contextlib.suppress(FusequeueError, TimeoutError):
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            depths = await services.queue.workers.queue_depths()
            workers = await services.queue.workers.all()
            fleet = fleet_of(workers, await services.queue.workers.mean_start_s())
            scale = wanted_workers(
                await services.queue.workers.signature_loads(), fleet, services.settings.target_wait_s
            )
            dead = await services.queue.dead_letters.count()
    metrics.show_depths(depths)
    metrics.show_workers(workers)
    metrics.show_scale(scale, dead)
