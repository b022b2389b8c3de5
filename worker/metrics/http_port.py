"""A worker's own HTTP port: /healthz, /readyz and /metrics, answered on its event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Protocol

import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from shared.config.settings import Settings
from shared.errors import ConfigurationError
from shared.runtime import metrics
from shared.runtime.log import announce

log = structlog.get_logger()

CONNECTIONS = 32  # probes and scrapes come one at a time; more than this is no scrape
KEEP_ALIVE_S = 15
MAX_HEAD_BYTES = 16 * 1024
STOP_S = 2


class Observed(Protocol):
    """What is told of a worker."""

    def unready(self) -> str | None:
        """Return why it takes no jobs now; None: it does."""

    async def refresh_metrics(self) -> None:
        """Bring the gauges up to date."""


class _Server(uvicorn.Server):
    """Leaves the signals to the worker: they start its drain, during which it is still scraped."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def answering(settings: Settings, worker: Observed) -> AsyncIterator[None]:
    """Answer on `worker_port` for as long as the block lasts; raises `ConfigurationError` where it cannot be had."""
    if settings.worker_port is None:
        yield
        return
    listening = _listen(settings.worker_host, settings.worker_port)
    config = uvicorn.Config(
        application(worker),
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=CONNECTIONS,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=STOP_S,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listening]), name="worker-port")
    announce("worker_port", host=settings.worker_host, port=settings.worker_port)
    try:
        yield
    finally:
        server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)
        listening.close()


def application(worker: Observed) -> Starlette:
    """Return what answers for `worker`."""

    async def alive(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(_: Request) -> Response:
        reason = worker.unready()
        if reason is None:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready", "reason": reason}, status_code=503)

    async def prometheus(_: Request) -> Response:
        await worker.refresh_metrics()
        return Response(metrics.exposition(), media_type=metrics.CONTENT_TYPE)

    routes = {"/healthz": alive, "/readyz": ready, "/metrics": prometheus}
    return Starlette(routes=[Route(path, answer) for path, answer in routes.items()])


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigurationError(
            f"FUSEQUEUE_WORKER_HOST {host}, FUSEQUEUE_WORKER_PORT {port}: {error.strerror or error}; "
            "each worker of a machine needs a port of its own"
        ) from error
