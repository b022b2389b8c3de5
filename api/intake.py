"""From the raw bytes of one request or line to a job in the queue."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from api import strict_json
from api.idempotency import Once
from api.services import Services
from shared import metrics
from shared.clock import now_ms
from shared.errors import FetchRefused, FusequeueError, InvalidRequest
from shared.fetch import Guard, Rules
from shared.inputs import PictureStore
from shared.job import InputRef
from shared.queue import Submission, Submitted
from shared.request import Inputs, JobRequest, check, parse, resolve
from shared.signature import signature

NO_KEY = Once()
_submitting: set[asyncio.Task[list[Submitted | FusequeueError]]] = set()


async def submission(raw: bytes, tenant: str, services: Services, once: Once) -> Submission | Submitted:
    """Return the job that `raw` asks for, ready to be submitted, or raise what is wrong with it.

    The pictures it starts from are stored by then, unless the job is known by its Idempotency-Key already: then that
    one is returned, and nothing is fetched.
    """
    return await submission_of(parse(strict_json.decode(raw)), tenant, services, once)


async def submission_of(
    request: JobRequest, tenant: str, services: Services, once: Once = NO_KEY
) -> Submission | Submitted:
    """Return the job of a request that is parsed already, as `submission` does."""
    spec = services.catalog.get(request.model)
    _check_webhook(request, services)
    check(request, spec)  # before anything is fetched or stored for a job that would be refused anyway
    if once.key is not None and (request.image is not None or request.images is not None):
        known = await services.queue.submitted_before(tenant, once.key, once.fingerprint)
        if known is not None:
            metrics.submits.labels(spec.id, _word(known)).inc()
            return known
    inputs = await _stored_inputs(request, tenant, services)
    job = resolve(request, services.catalog, tenant=tenant, now_ms=now_ms(), inputs=inputs)
    return Submission(
        job=job,
        signature=signature(job),
        window_ms=spec.window_ms,
        max_batch=services.catalog.for_size(spec.id, job.width, job.height).max_batch,
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


def _check_webhook(request: JobRequest, services: Services) -> None:
    if request.webhook is None:
        return
    try:
        Guard(Rules.for_webhooks(services.settings)).consider(request.webhook)
    except FetchRefused as error:
        raise InvalidRequest(f"webhook: {error.message}", param="webhook") from error


async def _stored_inputs(request: JobRequest, tenant: str, services: Services) -> Inputs:
    """Return the pictures that the request names; one after the other, so that a request holds one in memory."""
    store = PictureStore(tenant, services.queue, services.storage, services.settings)

    async def stored(value: str | None, param: str) -> InputRef | None:
        return None if value is None else await store.resolve(value, param)

    named = {"image": request.image} if request.image is not None else {}
    named = named or {f"images.{at}": value for at, value in enumerate(request.images or ())}
    return Inputs(
        images=tuple([await store.resolve(value, param) for param, value in named.items()]),
        mask=await stored(request.mask, "mask"),
        last_image=await stored(request.last_image, "last_image"),
    )


def _word(outcome: Submitted | FusequeueError) -> str:
    if isinstance(outcome, FusequeueError):
        return outcome.code
    return "replayed" if outcome.replayed else "accepted"
