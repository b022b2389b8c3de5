"""The API as an ASGI application: routes, middleware, and the services it opens and closes."""

import asyncio
import contextlib
import functools
import re
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import structlog
from fastapi import APIRouter, FastAPI
from fastapi.params import Depends
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute

from api import errors
from api.auth import Authenticator
from api.context import ADMIN_SCOPE, JOBS_SCOPE, Services
from api.grouping import Grouped
from api.http import openapi
from api.http.bodies import BodyShares, max_json_bytes
from api.http.connections import capacity, open_files
from api.http.direct_routes import DirectRoutes
from api.http.head_requests import HeadRequests
from api.http.middleware import BodyCaps, BodyLimits, RequestLog
from api.http.request_traces import RequestTraces
from api.http.streaming import RESPONSE_PIECES
from api.jobs.job_builder import JobTemplates
from api.keys_required import KeysRequired
from api.learned_models import LearnedModels
from api.page import assets, graph, live, session
from api.protocols.served import PROTOCOLS
from api.protocols.served_protocol import ServedProtocol
from api.readiness import CHECK_TIMEOUT_S, Readiness
from api.responses import QueuePositions
from api.routes import (
    adapters,
    artifacts,
    bulk,
    events,
    group_archives,
    groups,
    health,
    inputs,
    job_changes,
    job_lists,
    jobs,
    matching_jobs,
    models,
    usage,
    webhooks,
)
from api.routes.operators import cost_curves, dead_letters, keys, model_orders, operations, pauses, tenants
from api.waiting import Waiters
from shared.config import models_file
from shared.config.catalog import Catalog
from shared.config.models_watch import ModelsWatch, follow_models
from shared.config.settings import Settings
from shared.errors import RedisUnavailable
from shared.queue import EventFeed, Queue
from shared.runtime import tracing
from shared.runtime.asyncio_tools import cancel_and_wait
from shared.runtime.shares import SharedPool
from shared.storage import CHUNK_BYTES, connect
from shared.storage.output_buckets import OutputBuckets

log = structlog.get_logger()

RESPONSE_BYTES = 256 * 1024 * 1024  # of large responses that are being sent; see `count_response`
GROUPED_SUBMITS = 32  # jobs that one script queues: it holds Redis for about 2 ms

# Response headers that pages of other origins can read.
EXPOSED_HEADERS = (
    *("ETag", "Idempotent-Replayed", "Location", "Preference-Applied", "RateLimit", "RateLimit-Policy"),
    *("Retry-After", "WWW-Authenticate", "retry-after-ms", "x-job-id", "x-request-id", "x-seed", "x-warning"),
    *(f"x-ratelimit-{name}-requests" for name in ("limit", "remaining", "reset")),
)

# Request headers of pages of other origins, beside those that the clients of protocols send.
ALLOWED_HEADERS = (
    *("Authorization", "Content-Type", "Idempotency-Key", "If-Match", "If-None-Match", "If-Range"),
    *("Last-Event-ID", "Prefer", "Range", "traceparent", "tracestate", "x-request-id"),
)

_CORS: dict[str, Any] = {
    "allow_methods": ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"],
    "expose_headers": EXPOSED_HEADERS,
    "max_age": 600,
}

_DESCRIPTION = """
Generate images and videos. Submit with `POST /v1/jobs`, then poll `GET /v1/jobs/{id}` or subscribe to its events.

Every error is `application/problem+json`: `code` is for programs, `error.param` names the invalid field, and
`x-request-id` identifies the request in the logs. 429 and 503 carry `Retry-After`.
"""


_DESCRIBED: dict[str, Any] = {
    "title": "fusequeue",
    "version": "1",
    "summary": "A job service for diffusion models with continuous batching.",
    "description": _DESCRIPTION,
}


def create_app(
    settings: Settings,
    *,
    queue: Queue | None = None,
    shares_port: bool = False,
    protocols: tuple[ServedProtocol, ...] = PROTOCOLS,
) -> FastAPI:
    """Return the API for `settings`; a given `queue` is used and not closed.

    `shares_port`: other processes serve the same port.
    """
    catalog = models_file.load(settings.models, settings.batch_rules)
    watch = ModelsWatch(settings.models, settings.batch_rules)
    caps = BodyCaps(settings.max_body_bytes, _body_caps(settings, catalog, protocols))

    def models_changed() -> None:
        caps.replace(_body_caps(settings, catalog, protocols))

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            app.state.services = await _open_services(stack, settings, catalog, watch, queue)
            following = asyncio.create_task(follow_models(watch, catalog, models_changed))
            stack.push_async_callback(cancel_and_wait, (following,))
            yield
            app.state.services.closing.set()

    app = FastAPI(
        **_DESCRIBED,
        lifespan=lifespan,
        routes=list(_routes(protocols)),
        redirect_slashes=False,
        openapi_url=None,  # `openapi.install` serves it
        docs_url=None,
        redoc_url=None,
        exception_handlers=errors.HANDLERS,
        generate_unique_id_function=openapi.operation_id,
        telemetry={"tracing": False, "metrics": False, "logs": False},  # `shared.runtime.tracing` has its own
    )
    app.state.shares_port = shares_port
    app.state.methods = _methods(protocols)
    app.state.error_forms = tuple(protocol.error_form for protocol in protocols)
    openapi.install(app, partial(_document, protocols))
    _add_middleware(app, settings, caps, protocols)
    return app


def _add_middleware(app: FastAPI, settings: Settings, caps: BodyCaps, protocols: tuple[ServedProtocol, ...]) -> None:
    """Add what handles a request before its route; the last one added is the outermost, and receives all of them."""
    direct = (*jobs.DIRECT, *(route for protocol in protocols for route in protocol.direct_routes))
    app.add_middleware(DirectRoutes, routes=direct)
    app.add_middleware(
        BodyShares,
        largest_json=max(settings.max_body_bytes, max_json_bytes(settings)),
        largest_file=max(settings.max_file_bytes, settings.max_adapter_bytes),
    )
    app.add_middleware(HeadRequests, own=_paths_with_head(protocols))
    app.add_middleware(BodyLimits, caps=caps)
    if settings.cors_origins:
        headers = (*ALLOWED_HEADERS, *(name for protocol in protocols for name in protocol.request_headers))
        app.add_middleware(CORSMiddleware, allow_origins=settings.cors_origins, allow_headers=headers, **_CORS)
    app.add_middleware(RequestLog)
    if tracing.enabled():
        app.add_middleware(RequestTraces)


@functools.cache
def _document(protocols: tuple[ServedProtocol, ...]) -> dict[str, Any]:
    """Return the OpenAPI document, once for all apps of a process; FastAPI takes 1.2 s for it."""
    described = FastAPI(**_DESCRIBED, routes=list(_routes(protocols)), generate_unique_id_function=openapi.operation_id)
    return openapi.complete(described.openapi(), dict.fromkeys(protocol.error_form.model for protocol in protocols))


@functools.cache
def _routes(protocols: tuple[ServedProtocol, ...]) -> tuple[BaseRoute, ...]:
    """Return the routes, once for all apps of a process: FastAPI prepares each at its first request, 0.2 s in all."""
    everything = APIRouter(generate_unique_id_function=openapi.operation_id)
    for router, scopes in _routers(protocols):
        everything.include_router(router, dependencies=scopes)
    return tuple(everything.routes)


@functools.cache
def _methods(protocols: tuple[ServedProtocol, ...]) -> dict[str, frozenset[str]]:
    """Return the methods of each path."""
    methods: dict[str, frozenset[str]] = {}
    for router, _ in _routers(protocols):
        for route in router.routes:
            if isinstance(route, APIRoute) and route.include_in_schema:
                path = route.path_format
                methods[path] = methods.get(path, frozenset()) | frozenset(route.methods or ())
    return {path: own | {"HEAD"} if "GET" in own else own for path, own in methods.items()}


@functools.cache
def _paths_with_head(protocols: tuple[ServedProtocol, ...]) -> tuple[re.Pattern[str], ...]:
    """Return the paths that have a HEAD of their own."""
    routes = [route for router, _ in _routers(protocols) for route in router.routes if isinstance(route, APIRoute)]
    return tuple(route.path_regex for route in routes if "HEAD" in (route.methods or ()))


def _routers(protocols: tuple[ServedProtocol, ...]) -> Iterator[tuple[APIRouter, Sequence[Depends]]]:
    """Yield the routers in the order in which paths are matched, and the scopes that their requests need."""
    native = (jobs, bulk, inputs, adapters, models, webhooks)
    # Before `models`: its path also matches `:load`, and a refused method is answered by the first path that matches.
    yield model_orders.router, [ADMIN_SCOPE]
    for router in (*(module.router for module in native), *_routers_of(protocols), live.router):
        yield router, [JOBS_SCOPE]
    # They require the scope, which `tenant` changes.
    for router in (
        jobs.reads,
        *(module.router for module in (job_lists, job_changes, matching_jobs, usage, groups, group_archives, graph)),
    ):
        yield router, []
    for module in (operations, dead_letters, pauses, cost_curves, tenants, keys):
        yield module.router, [ADMIN_SCOPE]
    yield operations.scale_router, []
    # No scope for all of these: URLs of artifacts and events can be signed, health is open, and metrics require their
    # own.
    # The page's files hold no data; its session is that of any key.
    signed = (router for protocol in protocols for router in protocol.signed_routers)
    for router in (artifacts.router, events.router, *signed, health.router, session.router, assets.router):
        yield router, []


def _routers_of(protocols: Iterable[ServedProtocol]) -> Iterator[APIRouter]:
    return (router for protocol in protocols for router in protocol.routers)


def _body_caps(settings: Settings, catalog: Catalog, protocols: Iterable[ServedProtocol]) -> dict[str, int | None]:
    """Return the body limits of paths that differ from the default; None: the route limits its body itself.

    `*` stands for any part of a path.
    """
    with_image = max_json_bytes(settings)  # as a data URL, the same wherever a job is created
    caps: dict[str, int | None] = {
        "/v1/inputs": settings.max_input_bytes + inputs.OVERHEAD_BYTES,
        "/v1/adapters": settings.max_adapter_bytes + adapters.OVERHEAD_BYTES,
        "/v1/jobs": with_image,
        "/page/jobs": with_image,
        "/v1/jobs:bulk": None,
    }
    for protocol in protocols:
        caps |= protocol.body_limits(settings, catalog)
    return caps


async def _open_services(
    stack: contextlib.AsyncExitStack, settings: Settings, catalog: Catalog, watch: ModelsWatch, queue: Queue | None
) -> Services:
    """Connect to Redis and the storage and start the event feed; `stack` closes all of them."""
    if queue is None:
        queue = Queue.connect(settings)
        stack.push_async_callback(queue.close)
    storage = connect(settings)
    stack.push_async_callback(storage.close)
    output_buckets = OutputBuckets(settings)
    stack.push_async_callback(output_buckets.close)
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            await queue.check()  # raises IncompatibleRedis for a Redis that could lose jobs
            await queue.policies.try_announce("api")  # the first request follows those that apply
    except (RedisUnavailable, TimeoutError) as error:  # it can return later
        log.warning("redis_check_failed", reason=str(error))
    stack.push_async_callback(cancel_and_wait, (asyncio.create_task(queue.policies.keep_announced("api")),))
    readiness = Readiness(queue, storage)
    stack.push_async_callback(readiness.close)
    keys_required = KeysRequired(queue, storage, settings)
    if keys_required.decided is None:
        await keys_required.update()
    stack.push_async_callback(cancel_and_wait, (asyncio.create_task(keys_required.watch()),))
    feed = await stack.enter_async_context(EventFeed(queue))
    closing = asyncio.Event()
    most = capacity(open_files(), settings.max_connections)
    waiters = Waiters(feed, closing, settings.sse_keepalive_s, most.waiters)
    stack.push_async_callback(cancel_and_wait, (asyncio.create_task(waiters.end_when_closing()),))
    return Services(
        settings=settings,
        catalog=catalog,
        models_watch=watch,
        learned_models=LearnedModels(catalog, queue),
        queue=queue,
        storage=storage,
        output_buckets=output_buckets,
        authenticator=Authenticator(queue, settings, keys_required),
        queue_positions=QueuePositions(queue),
        job_templates=JobTemplates(catalog),
        submits=Grouped(partial(queue.jobs.submit, positions=True), GROUPED_SUBMITS),
        waiters=waiters,
        requests=SharedPool("requests", most.connections),
        responses=SharedPool("response_memory", min(RESPONSE_BYTES, most.downloads * RESPONSE_PIECES * CHUNK_BYTES)),
        readiness=readiness,
        closing=closing,
    )


async def preflight(settings: Settings) -> None:
    """Raise the errors that would keep an API of these settings from starting."""
    queue, storage = Queue.connect(settings), connect(settings)
    try:
        with contextlib.suppress(RedisUnavailable, TimeoutError):
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                await queue.check()
    finally:
        await storage.close()
        await queue.close()
