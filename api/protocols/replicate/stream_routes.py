"""Streams of predictions. Their URLs are signed: Replicate's client for JavaScript sends no key there."""

import contextlib
import json
from collections.abc import AsyncGenerator
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from api.context import Expires, RequestContext, ServicesDep, Signature, events_context
from api.http import openapi
from api.http.openapi import event_stream, operation_ids
from api.http.streaming import SSE_KEEPALIVE, sse_message, sse_response
from api.protocols.job_logs import logs, progress_line, warning_lines
from api.protocols.replicate.prediction_routes import outputs_of
from api.protocols.replicate.predictions import PREFIX, prediction
from api.protocols.text_errors import TextProblem
from api.routes.events import check_access
from shared.errors import NotFound, Unauthenticated, Unavailable
from shared.job import State
from shared.job_record import JobRecord, Progress

problems = partial(openapi.problems, model=TextProblem)
router = APIRouter(prefix=PREFIX, tags=["Replicate"], generate_unique_id_function=operation_ids("replicate"))


async def _stream_context(
    request: Request,
    prediction_id: str,
    services: ServicesDep,
    expires: Expires = None,
    signature: Signature = None,
) -> RequestContext:
    """Return the context of a request for a stream, by key or by signed URL."""
    return await events_context(request, prediction_id, services, expires, signature)


@router.get(
    "/predictions/{prediction_id}/stream",
    response_class=Response,
    responses=problems(404, 422, 503)
    | {200: event_stream("Events `logs`, `output`, and at the end `done` or `error`.")},
)
async def stream_prediction(
    request: Request, prediction_id: str, context: Annotated[RequestContext, Depends(_stream_context)]
) -> Response:
    """Stream a prediction with server-sent events: `logs` with its progress, `output` per image, then `done`.
    `urls.stream` of a prediction needs no key."""
    record = await context.find_job(prediction_id)
    context.waiters.check()
    return sse_response(_events(request, record, context))


async def _events(request: Request, record: JobRecord, context: RequestContext) -> AsyncGenerator[bytes]:
    """Yield the events of a job: its logs, keep-alives, then its images and `done`, or one `error`.

    Every event has an id: clients ignore events without one. It ends when its key is revoked or its URL expires.
    """
    key = request.headers.getlist("authorization")
    job, services, last = record.job, context.services, Progress()
    yield sse_message("logs", logs(record, last), "seed")
    try:
        async with contextlib.aclosing(context.waiters.events(job.id)) as events:
            async for event in events:
                with contextlib.suppress(Unavailable):
                    await check_access(context, key)
                if event is None:
                    yield SSE_KEEPALIVE
                    continue
                if event.state is not None and event.state.terminal:
                    break
                if event.progress is not None and event.progress.step > last.step:
                    last = event.progress
                    yield sse_message("logs", f"{progress_line(last)}\n", str(last.step))
        ended = await services.queue.jobs.get(job.id)
        if ended is None or not ended.state.terminal:
            raise Unavailable("the stream was interrupted; read the prediction")
        if ended.warnings:
            yield sse_message("logs", warning_lines(ended), "warnings")
        if ended.state is State.SUCCEEDED:
            for index, output in enumerate(await outputs_of(request, ended, context)):
                yield sse_message("output", output, f"output:{index}")
        elif ended.state is not State.CANCELED:
            yield sse_message("error", prediction(ended, context.base_url, "")["error"], "error")
            return
        reason = {"reason": "canceled"} if ended.state is State.CANCELED else {}
        yield sse_message("done", json.dumps(reason), "done")
    except (Unavailable, NotFound, Unauthenticated) as error:  # the response status was sent already
        yield sse_message("error", error.public, "interrupted")
