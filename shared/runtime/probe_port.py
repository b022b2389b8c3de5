"""The port of one process for probes and scrapes: /healthz, /readyz and /metrics, without a key."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from shared.errors import ConfigurationError
from shared.runtime import metrics
from shared.runtime.log import announce

MAX_CONNECTIONS = 32  # more than probes and scrapes need
KEEP_ALIVE_S = 15
MAX_HEAD_BYTES = 16 * 1024
SHUTDOWN_TIMEOUT_S = 2


class ProbedProcess(NamedTuple):
    """What the port serves of a process: why it is not ready, None when it is, and its metrics.

    `setting` is the name of the settings of the port without `_host` and `_port`.
    """

    setting: str
    unready: Callable[[], Awaitable[str | None]]
    exposition: Callable[[], Awaitable[bytes]]


@contextlib.asynccontextmanager
async def probe_port(host: str, port: int, process: ProbedProcess) -> AsyncIterator[None]:
    """Serve the port during the block; raises `ConfigurationError` when it is not free."""
    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        name = f"FUSEQUEUE_{process.setting.upper()}"
        raise ConfigurationError(
            f"cannot listen on {name}_HOST {host}, {name}_PORT {port}: {error.strerror or error}; "
            "give each process of a machine another port"
        ) from error
    config = uvicorn.Config(
        application(process),
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
    # The process handles signals itself: it is still scraped during its drain.
    server.capture_signals = contextlib.nullcontext  # type: ignore[assignment, method-assign]
    serving = asyncio.create_task(server.serve(sockets=[listening]), name="probe-port")
    announce(f"{process.setting}_port", host=host, port=port)
    try:
        yield
    finally:
        server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)
        listening.close()


def application(process: ProbedProcess) -> Starlette:
    """Return the three routes."""

    async def healthz(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def readyz(_: Request) -> Response:
        if reason := await process.unready():
            return JSONResponse({"status": "not ready", "reason": reason}, status_code=503)
        return JSONResponse({"status": "ready"})

    async def prometheus(_: Request) -> Response:
        return Response(await process.exposition(), media_type=metrics.CONTENT_TYPE)

    return Starlette(routes=[Route("/healthz", healthz), Route("/readyz", readyz), Route("/metrics", prometheus)])
