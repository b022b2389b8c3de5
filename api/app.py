"""The API as an ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import structlog
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from api import errors
from api.auth import Authenticator
from api.compat.huggingface import images as huggingface
from api.compat.openai import batches, files, images, request_bodies, videos
from api.compat.replicate import files as replicate_files
from api.compat.replicate import models as replicate_models
from api.compat.replicate import predictions as replicate_predictions
from api.compat.replicate import webhook_secret as replicate_webhooks
from api.context import ADMIN_SCOPE, JOBS_SCOPE, Services
from api.http import openapi
from api.http.body_limits import BodyLimits
from api.http.middleware import RequestLog
from api.responses import QueuePositions
from api.routes import (
    artifacts,
    autoscaling,
    bulk,
    dead_letters,
    docs,
    events,
    health,
    inputs,
    jobs,
    models,
    queues,
    webhooks,
)
from api.waiting import Waiters
from shared.config import models_file
from shared.config.models_file import Catalog
from shared.config.settings import Settings
from shared.errors import RedisUnavailable
from shared.protocols.native import JobObject
from shared.queue import EventFeed, Queue
from shared.storage import Storage, connect

log = structlog.get_logger()

# What a page of another origin may read beside the body.
EXPOSED = (
    *("ETag", "Idempotent-Replayed", "Location", "Preference-Applied", "RateLimit", "RateLimit-Policy"),
    *("Retry-After", "WWW-Authenticate", "retry-after-ms", "x-request-id"),
    *(f"x-ratelimit-{what}-requests" for what in ("limit", "remaining", "reset")),
)

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
    served = models_file.load(settings.models, settings.batch_rules) if models_served is None else models_served

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
    _include_routes(app)
    openapi.complete(app, JobObject)
    # The one added last is the outermost: it sees all requests and errors.
    app.add_middleware(BodyLimits, default_bytes=settings.max_body_bytes, caps=_body_caps(settings, served))
    if settings.cors_origins:
        app.add_middleware(CORSMiddleware, **_cors(settings.cors_origins))
    app.add_middleware(RequestLog)
    return app


def _include_routes(app: FastAPI) -> None:
    for routes in (jobs, bulk, events, inputs, models, webhooks, files, images, batches, videos, huggingface):
        app.include_router(routes.router, dependencies=[JOBS_SCOPE])
    for of_replicate in (replicate_predictions, replicate_models, replicate_files, replicate_webhooks):
        app.include_router(of_replicate.router, dependencies=[JOBS_SCOPE])
    for of_operators in (queues, autoscaling, dead_letters):
        app.include_router(of_operators.router, dependencies=[ADMIN_SCOPE])
    for open_routes in (artifacts, health, docs):  # a picture's URL may be signed; metrics ask for a key themselves
        app.include_router(open_routes.router)


def _body_caps(settings: Settings, served: Catalog) -> dict[str, int | None]:
    """Return the largest body by path, where it is another than usual; None: the route has limits of its own."""
    uploads = settings.max_input_bytes + inputs.OVERHEAD_BYTES
    pictures = 1 + max(spec.limits.max_input_images for spec in served)  # those to edit, and a mask
    in_base64 = 4 * -(-settings.max_input_bytes // 3)
    return {
        "/v1/inputs": uploads,
        "/v1/jobs:bulk": None,
        "/v1/files": settings.max_file_bytes + files.OVERHEAD_BYTES,
        replicate_files.router.prefix: uploads,
        "/v1/images/edits": pictures * settings.max_input_bytes + request_bodies.OVERHEAD_BYTES,
        "/v1/videos": settings.max_input_bytes + request_bodies.OVERHEAD_BYTES,
        **{f"{huggingface.PREFIX}/{spec.id}": in_base64 + huggingface.OVERHEAD_BYTES for spec in served},
    }


def _cors(origins: Sequence[str]) -> dict[str, Any]:
    """Return what pages of `origins` may do: send keys in a header, and read what our answers tell in theirs."""
    return {
        "allow_origins": list(origins),
        "allow_methods": ["GET", "HEAD", "POST", "DELETE"],
        "allow_headers": [
            "Authorization",
            "Content-Type",
            "Idempotency-Key",
            "If-None-Match",
            "Last-Event-ID",
            "Prefer",
        ],
        "expose_headers": list(EXPOSED),
        "max_age": 600,
    }


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
    closing = asyncio.Event()
    return Services(
        settings=settings,
        catalog=served,
        queue=queue,
        storage=storage,
        authenticator=Authenticator(queue, settings),
        queue_positions=QueuePositions(queue),
        waiters=Waiters(feed, closing, settings.sse_keepalive_s),
        closing=closing,
    )


async def preflight(settings: Settings) -> None:
    """Raise what keeps an API of these settings from starting, before there is a server to trip over it."""
    queue, storage = Queue.connect(settings), connect(settings)
    try:
        with contextlib.suppress(RedisUnavailable, TimeoutError):
            async with asyncio.timeout(health.CHECK_TIMEOUT_S):
                await queue.check()
    finally:
        await storage.close()
        await queue.close()


async def _check(queue: Queue) -> None:
    """Refuse to start on a Redis that would lose jobs; one that is away may come back."""
    try:
        async with asyncio.timeout(health.CHECK_TIMEOUT_S):
            await queue.check()
    except (RedisUnavailable, TimeoutError) as error:
        log.warning("started_without_redis", reason=str(error))
