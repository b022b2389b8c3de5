"""`/v1/batches`: thousands of requests in one file."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse, Response

from api import strict_json
from api.context import Context, RequestContext
from api.http.middleware import JSON_TYPES, require_type
from api.http.openapi import body_schema, event_stream, problems, request_body
from api.http.streaming import SSE_KEEPALIVE, sse_message, sse_response
from api.jobs.request import validated
from api.protocols.openai.batches.batch_steps import WINDOW_S
from api.protocols.openai.objects import BatchList, BatchObject
from api.protocols.openai.request_bodies import LIST_PARAMETERS, ListParams, list_page, openai_problems
from api.protocols.openai.stored_files import ExpiresAfter
from api.protocols.sync_calls import RequestDigest, created_response, earlier_attempt, request_digest
from api.submission import IdempotencyKey, idempotency, reserved_id
from shared.batch import Batch
from shared.errors import NotFound, Unauthenticated, Unavailable
from shared.job_fields import MetadataKey, MetadataValue
from shared.runtime.clock import epoch_s, new_id

router = APIRouter(prefix="/v1/batches", tags=["files and batches"])

POLL_S = 1.0
READS_PER_S = 200
"""Reads of all batch streams of a tenant in one process: 2,000 a second made another tenant wait 2.6 s for a submit."""

_TIMES = ("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at")


class BatchRequest(BaseModel):
    """The body of `POST /v1/batches`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    input_file_id: Annotated[str, Field(max_length=64, description="A file of `POST /v1/files`.")]
    endpoint: Literal["/v1/images/generations", "/v1/images/edits", "/v1/videos", "/v1/jobs"]
    completion_window: Literal["24h"] = "24h"
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] | None = None
    output_expires_after: Annotated[
        ExpiresAfter | None, Field(description="How long the output and error files are kept, from the batch's end.")
    ] = None


_BODY = request_body("application/json", {"schema": body_schema(BatchRequest)})


@router.post(
    "", openapi_extra=_BODY, responses=openai_problems(404, 408, 409, 413, 415, 503) | {200: {"model": BatchObject}}
)
async def create_batch(request: Request, context: Context, key: IdempotencyKey = None) -> Response:
    """Create a batch from a JSONL file. Its lines become jobs of priority `bulk`, which use the free slots."""
    require_type(request, JSON_TYPES)
    raw = await request.body()
    params, digest = validated(BatchRequest, strict_json.decode(raw)), request_digest(request, (raw,))
    now = await context.services.queue.now_ms()  # the chores compare it with the time of Redis
    batch_id = await reserved_id(idempotency(key, raw), new_id("batch", now), context)
    batch = None if key is None else await _batch(batch_id, context)
    headers = {} if batch is None else {"Idempotent-Replayed": "true"}
    batch = batch or (await _earlier_batch(request, context, digest) if key is None else None)
    batch = batch or await _create(params, context, digest, batch_id, now)
    return created_response(request, context, digest, batch.id, batch_object(batch), **headers)


async def _earlier_batch(request: Request, context: RequestContext, digest: RequestDigest) -> Batch | None:
    batch_id = await earlier_attempt(request, context, digest)
    return None if batch_id is None else await _batch(batch_id, context)


async def _batch(batch_id: str, context: RequestContext) -> Batch | None:
    with contextlib.suppress(NotFound):  # its request recorded the id and was killed
        return await context.services.queue.batches.get(context.tenant, batch_id)
    return None


async def _create(
    params: BatchRequest, context: RequestContext, digest: RequestDigest, batch_id: str, now: int
) -> Batch:
    queue = context.services.queue
    batch = Batch(
        id=batch_id,
        tenant=context.tenant,
        endpoint=params.endpoint,
        input_file_id=params.input_file_id,
        output_file_id=new_id("file", now),
        error_file_id=new_id("file", now),
        base_url=context.base_url,
        created_at_ms=now,
        expires_at_ms=now + WINDOW_S * 1000,
        output_expires_after_s=None if params.output_expires_after is None else params.output_expires_after.seconds,
        signs_urls=context.signer is not None,
        metadata=params.metadata or {},
    )
    # First: a retry after a kill finds the batch.
    await queue.sync_calls.start(context.tenant, digest.attempt, batch.id)
    await queue.batches.create(batch)
    return batch


@router.get("", responses=openai_problems(503) | {200: {"model": BatchList}}, dependencies=[LIST_PARAMETERS])
async def list_batches(context: Context, params: Annotated[ListParams, Query()]) -> Response:
    """List batches, by default newest first."""
    batches, more = await context.services.queue.batches.page(
        context.tenant, params.after, params.rows, params.order == "desc"
    )
    return JSONResponse(list_page([batch_object(batch) for batch in batches], more))


@router.get("/{batch_id}", responses=problems(404, 503) | {200: {"model": BatchObject}})
async def get_batch(batch_id: str, context: Context) -> Response:
    """Get a batch; `request_counts` never decrease."""
    return JSONResponse(batch_object(await context.services.queue.batches.get(context.tenant, batch_id)))


@router.post("/{batch_id}/cancel", responses=problems(404, 503) | {200: {"model": BatchObject}})
async def cancel_batch(batch_id: str, context: Context) -> Response:
    """Cancel a batch. Finished results are kept, running jobs stop at their next step; every line has a result or an
    error in the files."""
    await context.services.queue.batches.cancel(context.tenant, batch_id)
    return await get_batch(batch_id, context)


_EVENTS = event_stream("An event `batch` with the whole batch, at the start and at every change, until its end.")


@router.get("/{batch_id}/events", response_class=Response, responses=problems(404, 503) | {200: _EVENTS})
async def get_batch_events(request: Request, batch_id: str, context: Context) -> Response:
    """Subscribe to a batch."""
    await context.services.queue.batches.get(context.tenant, batch_id)
    context.waiters.check()
    return sse_response(_events(batch_id, context, request.headers.getlist("authorization")))


async def _events(batch_id: str, context: RequestContext, key: list[str]) -> AsyncGenerator[bytes]:
    services, last, silent_s = context.services, b"", 0.0
    with contextlib.suppress(Unavailable, NotFound, Unauthenticated), context.waiters.counted():
        while not services.closing.is_set():
            await services.authenticator.caller(key)  # ends the stream of a revoked key
            batch = await services.queue.batches.get(context.tenant, batch_id)
            message = sse_message("batch", json.dumps(batch_object(batch), separators=(",", ":")))
            if message != last:
                yield message
                last, silent_s = message, 0.0
            elif silent_s >= services.settings.sse_keepalive_s:
                yield SSE_KEEPALIVE
                silent_s = 0.0
            if batch.status.terminal:
                return
            poll_s = interval_s(context.waiters.held, services.settings.sse_keepalive_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(services.closing.wait(), poll_s)
            silent_s += poll_s


def interval_s(streams: int, keepalive_s: float) -> float:
    """Return how long each of a tenant's `streams` waits before it reads its batch again, at most a keep-alive."""
    return max(POLL_S, min(streams / READS_PER_S, keepalive_s))


def batch_object(batch: Batch) -> dict[str, Any]:
    """Return a batch as OpenAI's SDKs read it."""
    has_files = batch.status.terminal
    errors = [error.model_dump() for error in batch.errors]
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": "24h",
        "status": batch.status.value,
        "output_file_id": batch.output_file_id if has_files and batch.has_output else None,
        "error_file_id": batch.error_file_id if has_files and batch.has_errors else None,
        "created_at": batch.created_at_ms // 1000,
        "expires_at": batch.expires_at_ms // 1000,
        **{name: epoch_s(getattr(batch, name)) for name in _TIMES},
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "metadata": batch.metadata,
    }
