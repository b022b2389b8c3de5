"""Batches: thousands of requests in one file, answered in another."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse, Response

from api.bodies import JSON_TYPES, require_type
from api.compat.openai.pagination import Page, listed
from api.compat.sync_calls import deliver, earlier_attempt, request_digest
from api.http.openapi import problems
from api.http.streaming import StreamedResponse
from api.visit import Context, RequestContext
from shared.errors import NotFound, Unauthenticated, Unavailable
from shared.protocols.openai.batches import WINDOW_S, Batch, BatchStatus
from shared.request import MetadataKey, MetadataValue, validated
from shared.runtime import strict_json
from shared.runtime.clock import new_id, now_ms

router = APIRouter(prefix="/v1/batches", tags=["files and batches"])

LOOK_S = 1.0
"""How often a stream of events reads its batch."""

_MOMENTS = (
    *("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at"),
)


class BatchRequest(BaseModel):
    """The body of `POST /v1/batches`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    input_file_id: Annotated[str, Field(max_length=64, description="A file of `POST /v1/files`.")]
    endpoint: Literal["/v1/images/generations", "/v1/images/edits", "/v1/videos", "/v1/jobs"]
    completion_window: Literal["24h"] = "24h"
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] | None = None


_BODY = {"content": {"application/json": {"schema": BatchRequest.model_json_schema()}}, "required": True}


@router.post("", openapi_extra={"requestBody": _BODY}, responses=problems(400, 404, 408, 409, 413, 415, 422, 503))
async def create_batch(request: Request, context: Context) -> Response:
    """Begin a batch of a JSONL file. Its lines become jobs of priority `bulk`: they fill the seats others leave."""
    require_type(request, JSON_TYPES)
    raw = await request.body()
    asked, digest = validated(BatchRequest, strict_json.decode(raw)), request_digest(request, (raw,))
    batch = await _joined(request, context, digest) or await _created(asked, context, digest)
    answer = json.dumps(batch_object(batch)).encode()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(answer))}
    return StreamedResponse(deliver(request, context, digest, batch.id, answer), headers=headers)


async def _joined(request: Request, context: RequestContext, digest: str) -> Batch | None:
    """Return the batch that an earlier try of this request began, whose answer did not arrive."""
    batch_id = await earlier_attempt(request, context, digest)
    with contextlib.suppress(NotFound):  # it came no further than to note its id
        return None if batch_id is None else await context.services.queue.batches.get(context.tenant, batch_id)
    return None


async def _created(asked: BatchRequest, context: RequestContext, digest: str) -> Batch:
    now, queue = now_ms(), context.services.queue
    batch = Batch(
        id=new_id("batch", now),
        tenant=context.tenant,
        endpoint=asked.endpoint,
        input_file_id=asked.input_file_id,
        output_file_id=new_id("file", now),
        error_file_id=new_id("file", now),
        base_url=context.base_url,
        created_at_ms=now,
        expires_at_ms=now + WINDOW_S * 1000,
        metadata=asked.metadata or {},
    )
    await queue.sync_calls.start(context.tenant, digest, batch.id)  # first: a kill in between begins no second batch
    await queue.batches.create(batch)
    return batch


@router.get("", responses=problems(404, 422, 503))
async def list_batches(context: Context, asked: Annotated[Page, Query()]) -> Response:
    """List batches, newest first."""
    found, more = await context.services.queue.batches.page(context.tenant, asked.after, asked.rows)
    return JSONResponse(listed([batch_object(batch) for batch in found], more))


@router.get("/{batch_id}", responses=problems(404, 503))
async def get_batch(batch_id: str, context: Context) -> Response:
    """Read a batch; `request_counts` never go back."""
    return JSONResponse(batch_object(await context.services.queue.batches.get(context.tenant, batch_id)))


@router.post("/{batch_id}/cancel", responses=problems(404, 503))
async def cancel_batch(batch_id: str, context: Context) -> Response:
    """Cancel a batch: what is done stays, what runs leaves at its next step, and the files tell of every line."""
    await context.services.queue.batches.cancel(context.tenant, batch_id)
    return JSONResponse(batch_object(await context.services.queue.batches.get(context.tenant, batch_id)))


@router.get(
    "/{batch_id}/events",
    responses=problems(404, 503)
    | {
        200: {
            "description": "An event `batch` with the whole batch, now and at every change; it ends with the batch.",
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
        }
    },
)
async def batch_events(request: Request, batch_id: str, context: Context) -> Response:
    """Subscribe to a batch."""
    await context.services.queue.batches.get(context.tenant, batch_id)
    context.services.waiter_limit.check()
    return StreamedResponse(
        _events(batch_id, context, request.headers.getlist("authorization")),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


async def _events(batch_id: str, context: RequestContext, key: list[str]) -> AsyncGenerator[bytes]:
    services, told, silent_s = context.services, b"", 0.0
    with contextlib.suppress(Unavailable, NotFound, Unauthenticated), services.waiter_limit.counted():
        while not services.closing.is_set():
            await services.authenticator.caller(key)  # it may have been revoked since
            batch = await services.queue.batches.get(context.tenant, batch_id)
            message = f"event: batch\ndata: {json.dumps(batch_object(batch), separators=(',', ':'))}\n\n".encode()
            if message != told:
                yield message
                told, silent_s = message, 0.0
            elif silent_s >= services.settings.sse_keepalive_s:
                yield b": keep-alive\n\n"
                silent_s = 0.0
            if batch.status.terminal:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(services.closing.wait(), LOOK_S)
            silent_s += LOOK_S


def batch_object(batch: Batch) -> dict[str, Any]:
    """Return a batch as OpenAI's SDKs read it."""
    ended = batch.status.terminal and batch.status is not BatchStatus.FAILED
    errors = [error.model_dump() for error in batch.errors]
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": "24h",
        "status": batch.status.value,
        "output_file_id": batch.output_file_id if ended and batch.has_output else None,
        "error_file_id": batch.error_file_id if ended and batch.has_errors else None,
        "created_at": batch.created_at_ms // 1000,
        "expires_at": batch.expires_at_ms // 1000,
        **{name: _seconds(getattr(batch, name)) for name in _MOMENTS},
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "metadata": batch.metadata,
    }


def _seconds(at_ms: int | None) -> int | None:
    return None if at_ms is None else at_ms // 1000
