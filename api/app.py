"""The API as an ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import structlog
from fastapi import FastAPI

from api import documented, errors
from api.limits import BodyLimits
from api.observe import Observed
from api.places import Places
from api.representations import JobObject
from api.routes import artifacts, bulk, dead, docs, events, health, inputs, jobs, listing, models, queues
from api.services import Services
from shared import catalog
from shared.catalog import Catalog
from shared.errors import RedisUnavailable
from shared.queue import EventFeed, Queue
from shared.settings import Settings
from shared.storage import Storage, connect

log = structlog.get_logger()

_DESCRIPTION = """
Jobs in, pictures out. Submit with `POST /v1/jobs`, then poll `GET /v1/jobs/{id}` or subscribe to its events.

Every error is `application/problem+json`: `code` is for programs, `error.param` names the field at fault, and
`x-request-id` finds the request in the logs. 429 and 503 carry `Retry-After`.
"""


def create_app(
    settings: Settings,
    *,
    models_served: Catalog | None = None,
    queue: Queue | None = None,
    storage: Storage | None = None,
) -> FastAPI:
    """Return the API for `settings`; parts that are given instead are used as they are, and not closed."""
    served = catalog.load(settings.models) if models_served is None else models_served

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            app.state.services = await _services(stack, settings, served, queue, storage)
            yield
            app.state.services.closing.set()

    app = FastAPI(
        title="fusequeue",
        version="1",
        summary="A job service that makes pictures of compatible jobs in one fused forward.",
        description=_DESCRIPTION,
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    errors.install(app)
    for routes in (jobs, listing, bulk, events, artifacts, inputs, models, queues, dead, health, docs):
        app.include_router(routes.router)
    documented.complete(app, JobObject)
    # The one added last is the outermost: it sees all requests and errors.
    uploads = settings.max_input_bytes + inputs.OVERHEAD_BYTES
    caps = {"/v1/inputs": uploads, "/v1/jobs:bulk": None}
    app.add_middleware(BodyLimits, default_bytes=settings.max_body_bytes, caps=caps)
    app.add_middleware(Observed)
    return app


async def _services(
    stack: contextlib.AsyncExitStack, settings: Settings, served: Catalog, queue: Queue | None, storage: Storage | None
) -> Services:
    """Connect to what is not given, start to follow the events, and leave it to `stack` to end both."""
    if queue is None:
        queue = Queue.connect(settings)
        stack.push_async_callback(queue.close)
    if storage is None:
        storage = connect(settings)
        stack.push_async_callback(storage.close)
    await _check(queue)
    feed = await stack.enter_async_context(EventFeed(queue))
    return Services(settings, served, queue, feed, storage, Places(queue))


async def _check(queue: Queue) -> None:
    """Refuse to start on a Redis that would lose jobs; one that is away may come back."""
    try:
        async with asyncio.timeout(health.CHECK_TIMEOUT_S):
            await queue.check()
    except (RedisUnavailable, TimeoutError) as error:
        log.warning("started_without_redis", reason=str(error))
