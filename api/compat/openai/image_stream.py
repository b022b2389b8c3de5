"""Pictures as Server-Sent Events, in OpenAI's words."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from api.compat.openai import results
from api.errors import STATUSES, problem
from api.visit import RequestContext
from api.waiting import follow
from shared.errors import FusequeueError, NotFound, Unavailable
from shared.job import Job, JobRecord, State
from shared.protocols.openai.images import ImageRequest, created_s, response_fields, usage
from shared.runtime.clock import now_ms


async def lines(
    job_id: str, asked: ImageRequest, context: RequestContext, scope: Mapping[str, Any]
) -> AsyncGenerator[bytes]:
    """Yield the stream of a job: previews and, in silence, comments; then each picture, or one `error`."""
    services = context.services
    partials = _Partials(job_id, asked, context)
    try:
        with services.waiter_limit.counted():
            async with (
                services.feed.subscribe(job_id, None) as events,
                contextlib.aclosing(follow(events, services.closing, services.settings.sse_keepalive_s)) as followed,
            ):
                async for event in followed:
                    if event is None:
                        yield b": keep-alive\n\n"
                        continue
                    if event.state is not None and event.state.terminal:
                        break
                    async for message in partials.new():
                        yield message
        record = await services.queue.jobs.get(job_id)
        if record is None or not record.state.terminal:
            raise Unavailable("the stream was interrupted; send the request again")
        if record.state is not State.SUCCEEDED:
            yield _message("error", json.loads(bytes(results.failed(scope, record).body)))
            return
        async for message in partials.new():
            yield message
        async for message in _completed(record, asked, context):
            yield message
    except (Unavailable, NotFound) as error:  # too late for a status
        yield _message("error", json.loads(bytes(problem(scope, _code(error), error.message).body)))


class _Partials:
    """The previews of a job, each told once."""

    def __init__(self, job_id: str, asked: ImageRequest, context: RequestContext) -> None:
        self._job_id = job_id
        self._asked = asked
        self._here = context
        self._told: set[str] = set()
        self._job: Job | None = None

    async def new(self) -> AsyncGenerator[bytes]:
        """Yield those that have come since the last time."""
        if not self._asked.previews:
            return
        queue, kind = self._here.services.queue, f"{self._asked.kind}.partial_image"
        for preview in await queue.previews.get(self._job_id, self._told):
            self._told.add(preview.name)
            if self._job is None:
                record = await queue.jobs.get(self._job_id)
                if record is None:
                    return
                self._job = record.job
            told = {
                "type": kind,
                "b64_json": preview.b64,
                "created_at": now_ms() // 1000,
                **response_fields(self._job, self._asked.fields.quality),
                "output_format": self._job.output_format.of_previews.value,
                "partial_image_index": preview.number,
                "index": preview.index,
            }
            yield _message(kind, told)


async def _completed(record: JobRecord, asked: ImageRequest, context: RequestContext) -> AsyncGenerator[bytes]:
    """Yield one event a picture; OpenAI's has no number, which clients of several find in `index`."""
    kind = f"{asked.kind}.completed"
    for artifact in record.artifacts:
        told = {
            "type": kind,
            "b64_json": await results.b64(artifact.key, context),
            "created_at": created_s(record),
            **response_fields(record.job, asked.fields.quality),
            "usage": usage(record.job),
            "id": record.job.id,
            "index": artifact.index,
            "seed": artifact.seed,
        }
        yield _message(kind, told)


def _code(error: FusequeueError) -> str:
    return error.code if error.code in STATUSES else Unavailable.code


def _message(kind: str, data: Mapping[str, Any]) -> bytes:
    return f"event: {kind}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()
