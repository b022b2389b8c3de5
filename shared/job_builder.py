"""From a parsed request to a job that is ready for the queue: its model's limits kept, its pictures stored."""

from __future__ import annotations

import re
from typing import Protocol

from shared.config.models_file import Catalog
from shared.config.settings import Settings
from shared.errors import FetchRefused, InvalidRequest
from shared.inputs.fetch_guard import FetchGuard, FetchRules
from shared.inputs.store import InputStore
from shared.job import InputRef, Job
from shared.queue import Queue, Submission
from shared.request import Inputs, JobRequest, check, resolve
from shared.runtime.clock import now_ms
from shared.signature import signature
from shared.storage import Storage

_BATCH = re.compile(r"batch_[0-9a-z]{26}")


class Parts(Protocol):
    """What a request is checked against and stored in."""

    @property
    def settings(self) -> Settings: ...
    @property
    def catalog(self) -> Catalog: ...
    @property
    def queue(self) -> Queue: ...
    @property
    def storage(self) -> Storage: ...


def checked(request: JobRequest, parts: Parts) -> None:
    """Raise what is wrong with a request, as far as that can be told without fetching a picture."""
    _check_webhook(request, parts.settings)
    if request.batch_id is not None and _BATCH.fullmatch(request.batch_id):
        raise InvalidRequest("batch_id: names of this form are for the batches of /v1/batches", param="batch_id")
    check(request, parts.catalog.get(request.model))


async def resolved(request: JobRequest, tenant: str, parts: Parts) -> Job:
    """Return the job that a checked request means; the pictures it starts from are stored by then."""
    inputs = await _stored_inputs(request, tenant, parts)
    return resolve(request, parts.catalog, tenant=tenant, now_ms=now_ms(), inputs=inputs)


def submission_of(job: Job, catalog: Catalog, key: str | None = None, fingerprint: str | None = None) -> Submission:
    """Return a job ready to be put in line."""
    return Submission(
        job=job,
        signature=signature(job),
        window_ms=catalog.get(job.model).window_ms,
        max_batch=catalog.for_size(job.model, job.width, job.height).max_batch,
        idempotency_key=key,
        fingerprint=fingerprint,
    )


def _check_webhook(request: JobRequest, settings: Settings) -> None:
    if request.webhook is None:
        return
    try:
        FetchGuard(FetchRules.for_webhooks(settings)).consider(request.webhook)
    except FetchRefused as error:
        raise InvalidRequest(f"webhook: {error.message}", param="webhook") from error


async def _stored_inputs(request: JobRequest, tenant: str, parts: Parts) -> Inputs:
    """Return the pictures that the request names; one after the other, so that a request holds one in memory."""
    store = InputStore(tenant, parts.queue, parts.storage, parts.settings)

    async def stored(value: str | None, param: str) -> InputRef | None:
        return None if value is None else await store.resolve(value, param)

    named = {"image": request.image} if request.image is not None else {}
    named = named or {f"images.{at}": value for at, value in enumerate(request.images or ())}
    return Inputs(
        images=tuple([await store.resolve(value, param) for param, value in named.items()]),
        mask=await stored(request.mask, "mask"),
        last_image=await stored(request.last_image, "last_image"),
    )
