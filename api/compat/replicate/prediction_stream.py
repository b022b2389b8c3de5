"""A prediction as Server-Sent Events, in Replicate's words."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator

from api.compat.replicate import outputs
from api.context import RequestContext
from shared.errors import NotFound, Unauthenticated, Unavailable
from shared.job import JobRecord, Progress, State
from shared.protocols.replicate.predictions import logs, prediction, progress_line


async def lines(record: JobRecord, context: RequestContext, key: list[str]) -> AsyncGenerator[bytes]:
    """Yield the stream of a job: its logs as they grow, and in silence comments; then its pictures and `done`, or one
    `error`. `key` are the headers that let it in, which may cease to."""
    job, services = record.job, context.services
    yield _message("logs", logs(job, Progress()), "seed")
    told = Progress()
    try:
        async with contextlib.aclosing(services.waiters.events(job.id)) as events:
            async for event in events:
                with contextlib.suppress(Unavailable):
                    await services.authenticator.caller(key)
                if event is None:
                    yield b": keep-alive\n\n"
                    continue
                if event.state is not None and event.state.terminal:
                    break
                if event.progress is not None and event.progress.step > told.step:
                    told = event.progress
                    yield _message("logs", f"{progress_line(told)}\n", str(told.step))
        ended = await services.queue.jobs.get(job.id)
        if ended is None or not ended.state.terminal:
            raise Unavailable("the stream was interrupted; read the prediction")
        async for message in _ending(ended, context):
            yield message
    except (Unavailable, NotFound, Unauthenticated) as error:  # too late for a status
        yield _message("error", error.message, "interrupted")


async def _ending(record: JobRecord, context: RequestContext) -> AsyncGenerator[bytes]:
    if record.state is State.SUCCEEDED:
        for number, url in enumerate(await outputs.outputs(record, context)):
            yield _message("output", url, f"output:{number}")
    elif record.state is not State.CANCELED:
        yield _message("error", prediction(record, context.base_url, "")["error"], "error")
        return
    reason = {"reason": "canceled"} if record.state is State.CANCELED else {}
    yield _message("done", json.dumps(reason), "done")


def _message(kind: str, text: str, number: str) -> bytes:
    """Return one event; its id is what makes clients count it."""
    data = "".join(f"data: {line}\n" for line in text.split("\n"))
    return f"event: {kind}\nid: {number}\n{data}\n".encode()
