"""From the raw bytes of one request or line to a job in the queue."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from api import strict_json
from api.idempotency import Once
from api.services import Services
from shared import inputs, metrics
from shared.clock import now_ms
from shared.errors import FusequeueError
from shared.job import InputRef, Task
from shared.queue import Submission, Submitted
from shared.request import JobRequest, check_limits, parse, resolve
from shared.signature import signature

_submitting: set[asyncio.Task[list[Submitted | FusequeueError]]] = set()


async def submission(raw: bytes, tenant: str, services: Services, once: Once) -> Submission:
    """Return the job that `raw` asks for, ready to be submitted, or raise what is wrong with it.

    A picture it starts from is stored by then.
    """
    request = parse(strict_json.decode(raw))
    spec = services.catalog.get(request.model)
    image = await _stored_image(request, tenant, services)
    job = resolve(request, services.catalog, tenant=tenant, now_ms=now_ms(), image=image)
    return Submission(
        job=job,
        signature=signature(job),
        window_ms=spec.window_ms,
        max_batch=spec.max_batch,
        idempotency_key=once.key,
        fingerprint=once.fingerprint,
    )


async def submit(submissions: Sequence[Submission], services: Services) -> list[Submitted | FusequeueError]:
    """Submit whole or not at all: a client that leaves in the middle does not cut it short."""
    task = asyncio.ensure_future(services.queue.submit(submissions))
    _submitting.add(task)
    task.add_done_callback(_submitting.discard)
    outcomes = await asyncio.shield(task)
    for item, outcome in zip(submissions, outcomes, strict=True):
        metrics.submits.labels(item.job.model, _word(outcome)).inc()
    return outcomes


async def _stored_image(request: JobRequest, tenant: str, services: Services) -> InputRef | None:
    if request.image is None:
        return None
    # Before anything is fetched or stored for a job that would be refused anyway.
    check_limits(request, services.catalog.get(request.model), Task.IMAGE_TO_IMAGE)
    return await inputs.resolve_image(
        request.image, tenant=tenant, queue=services.queue, storage=services.storage, settings=services.settings
    )


def _word(outcome: Submitted | FusequeueError) -> str:
    if isinstance(outcome, FusequeueError):
        return outcome.code
    return "replayed" if outcome.replayed else "accepted"
