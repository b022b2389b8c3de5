"""HTTP responses that carry a job, and the cached queue positions in them."""

import asyncio
import contextlib
import hashlib
from collections.abc import Iterable
from typing import Literal

from cachetools import TTLCache
from starlette.responses import Response

from api.jobs.job_object import JobObject, QueueObject
from api.jobs.queue_reason import queue_reason
from shared.errors import NotFound
from shared.job_record import JobRecord
from shared.queue import Queue, QueuePosition, WorkerInfo
from shared.queue.order.position import QueueReason

MAX_RETRY_AFTER_S = 30
POSITION_CACHE_S = 1.0
WORKERS_CACHE_S = 2.0  # reading a thousand workers takes 26 ms of CPU time
MAX_CACHED_POSITIONS = 10_000


def job_response(
    job: JobObject, *, status: int = 200, if_none_match: str | None = None, headers: dict[str, str] | None = None
) -> Response:
    """Return a job with its ETag and when to poll again, or 304 where the client has this version."""
    body = job.model_dump_json().encode()
    all_headers = {
        "ETag": f'"{hashlib.sha256(body).hexdigest()[:32]}"',
        "Cache-Control": "private, no-cache",
        **(headers or {}),
    }
    if not job.status.terminal:
        all_headers["Retry-After"] = str(retry_after_s(job))
    if if_none_match is not None and etag_matches(if_none_match, all_headers["ETag"]):
        return Response(status_code=304, headers=all_headers)
    return Response(body, status, all_headers, "application/json")


def retry_after_s(job: JobObject) -> int:
    """Return when to poll again: after the estimated time for a queued job, after a second for a running one."""
    eta_s = job.queue.eta_s if job.queue is not None else None
    return 1 if eta_s is None else max(1, min(MAX_RETRY_AFTER_S, round(eta_s)))


def etag_matches(if_none_match: str, etag: str) -> bool:
    """Return whether the header `If-None-Match` names `etag`."""
    tags = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
    return "*" in tags or etag in tags


def existing_job(record: JobRecord | None, job_id: str) -> JobRecord:
    """Return the record, or raise `NotFound`: the job was deleted during the request."""
    if record is None:
        raise NotFound(f"job {job_id} was deleted during the request", param="id")
    return record


class QueuePositions:
    """Positions of queued jobs, cached for a second: clients poll more often than queues move."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._positions: TTLCache[str, QueuePosition | None] = TTLCache(MAX_CACHED_POSITIONS, POSITION_CACHE_S)
        self._workers: TTLCache[Literal["all"], list[WorkerInfo]] = TTLCache(1, WORKERS_CACHE_S)
        self._reading = asyncio.Lock()

    async def of(self, job_id: str, model: str, *, waits: bool | None = None) -> QueueObject | None:
        """Return the position of a job and why it waits, None when it is not queued.

        `waits` is whether it waits for its time or for others now, if that is known.
        """
        position = await self._position(job_id, waits)
        if position is None:
            return None
        workers = await self._live_workers()
        served = all(any(worker.serves(one) for worker in workers) for one in {model, *position.models})
        reason = queue_reason(position.reason, model, workers)
        return QueueObject(position=position.position, eta_s=position.eta_s if served else None, reason=reason)

    async def prepare(self, job_ids: Iterable[str]) -> None:
        """Cache the positions of queued jobs, in one read for a job and those that it waits for."""
        for job_id in sorted(job_ids, reverse=True):  # a job is newer than those that it waits for
            if job_id not in self._positions:
                found = await self._queue.jobs.positions(job_id)
                known = {one: at for one, at in found.items() if one == job_id or at.eta_s is not None}
                self._positions.update(known)

    def keep(self, job_id: str, position: QueuePosition | None) -> None:
        """Cache a position just read."""
        self._positions[job_id] = position

    async def _position(self, job_id: str, waits: bool | None) -> QueuePosition | None:
        """Return a cached position, unless the job has begun or ceased to wait since."""
        with contextlib.suppress(KeyError):
            position = self._positions[job_id]
            if position is None or waits in (None, position.reason is QueueReason.WAITING):
                return position
        position = await self._queue.jobs.position(job_id)
        self.keep(job_id, position)
        return position

    async def _live_workers(self) -> list[WorkerInfo]:
        """Return the workers, read once for all polls; only polls that need the read wait for it."""
        workers = self._workers.get("all")
        if workers is None:
            async with self._reading:
                workers = self._workers.get("all")
                if workers is None:
                    workers = self._workers["all"] = await self._queue.workers.all()
        return workers
