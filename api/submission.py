"""From the raw bytes of one request or line to a job in the queue."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from api.context import Services
from api.idempotency import Once
from shared import job_builder
from shared.errors import FusequeueError
from shared.queue import Submission, Submitted
from shared.request import JobRequest, parse
from shared.runtime import metrics, strict_json

NO_KEY = Once()
_submitting: set[asyncio.Task[list[Submitted | FusequeueError]]] = set()


async def submission(raw: bytes, tenant: str, services: Services, once: Once) -> Submission | Submitted:
    """Return the job that `raw` asks for, ready to be submitted, or raise what is wrong with it.

    The pictures it starts from are stored by then, unless the job is known by its Idempotency-Key already: then that
    one is returned, and nothing is fetched.
    """
    return await submission_of(parse(strict_json.decode(raw)), tenant, services, once)


async def submission_of(
    request: JobRequest, tenant: str, services: Services, once: Once = NO_KEY, *, previews: int = 0
) -> Submission | Submitted:
    """Return the job of a request that is parsed already, as `submission` does, with `previews` of each picture."""
    spec = services.catalog.get(request.model)
    job_builder.checked(
        request, services
    )  # before anything is fetched or stored for a job that would be refused anyway
    if once.key is not None and (request.image is not None or request.images is not None):
        known = await services.queue.jobs.submitted_before(tenant, once.key, once.fingerprint)
        if known is not None:
            metrics.submits.labels(spec.id, _word(known)).inc()
            return known
    job = await job_builder.resolved(request, tenant, services)
    if previews:
        job = job.model_copy(update={"previews": previews})
    return job_builder.submission_of(job, services.catalog, once.key, once.fingerprint)


async def submit(submissions: Sequence[Submission], services: Services) -> list[Submitted | FusequeueError]:
    """Submit whole or not at all: a client that leaves in the middle does not cut it short."""
    task = asyncio.ensure_future(services.queue.jobs.submit(submissions))
    _submitting.add(task)
    task.add_done_callback(_submitting.discard)
    outcomes = await asyncio.shield(task)
    for item, outcome in zip(submissions, outcomes, strict=True):
        metrics.submits.labels(item.job.model, _word(outcome)).inc()
    return outcomes


def _word(outcome: Submitted | FusequeueError) -> str:
    if isinstance(outcome, FusequeueError):
        return outcome.code
    return "replayed" if outcome.replayed else "accepted"
