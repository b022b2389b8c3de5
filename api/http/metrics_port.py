"""The port of one API process: its /healthz, /readyz and /metrics, without a key.

Where several processes share the API's port, a request there reaches any of them.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import uvicorn
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from api.context import Services
from api.routes.health import exposition, unreadiness
from shared.errors import ConfigurationError
from shared.runtime import metrics
from shared.runtime.log import announce

MAX_CONNECTIONS = 32  # more than probes and scrapes need
KEEP_ALIVE_S = 15
MAX_HEAD_BYTES = 16 * 1024
SHUTDOWN_TIMEOUT_S = 2


@contextlib.asynccontextmanager
async def metrics_port(host: str, port: int | None, api: FastAPI) -> AsyncIterator[None]:
    """Serve the port, if there is one, during the block; raises `ConfigurationError` when it is not free."""
    if port is None:
        yield
        return
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on FUSEQUEUE_API_METRICS_HOST {host}, FUSEQUEUE_API_METRICS_PORT {port}: "
            f"{error.strerror or error}; give each API process of a machine another port"
        ) from error
    config = uvicorn.Config(
        application(api),
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
    )
    server = uvicorn.Server(config)
    # The API's own server handles signals: this one serves during its drain.
    server.capture_signals = contextlib.nullcontext  # type: ignore[assignment, method-assign]
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="metrics-port")
    announce("api_metrics_port", host=host, port=port)
    try:
        yield
    finally:
        server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)
        listener.close()


def application(api: FastAPI) -> Starlette:
    """Return the three routes of an API process that starts, serves or drains."""

    def services() -> Services | None:
        return getattr(api.state, "services", None)

    async def healthz(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def readyz(_: Request) -> Response:
        opened = services()
        if reason := "the API is starting" if opened is None else await unreadiness(opened):
            return JSONResponse({"status": "not ready", "reason": reason}, status_code=503)
        return JSONResponse({"status": "ready"})

    async def prometheus(_: Request) -> Response:
        opened = services()
        content = metrics.exposition() if opened is None else await exposition(opened)
        return Response(content, media_type=metrics.CONTENT_TYPE)

    return Starlette(routes=[Route("/healthz", healthz), Route("/readyz", readyz), Route("/metrics", prometheus)])
