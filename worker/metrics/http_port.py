"""A worker's HTTP port: /healthz, /readyz and /metrics, served on its event loop."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from shared.errors import ConfigurationError
from shared.runtime import metrics
from shared.runtime.log import announce
from worker.worker import Worker

MAX_CONNECTIONS = 32  # more than probes and scrapes need
KEEP_ALIVE_S = 15
MAX_HEAD_BYTES = 16 * 1024
SHUTDOWN_TIMEOUT_S = 2


@contextlib.asynccontextmanager
async def http_port(host: str, port: int, worker: Worker) -> AsyncIterator[None]:
    """Serve the port during the block; raises `ConfigurationError` when it is not free."""
    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on FUSEQUEUE_WORKER_HOST {host}, FUSEQUEUE_WORKER_PORT {port}: "
            f"{error.strerror or error}; give each worker of a machine another port"
        ) from error
    config = uvicorn.Config(
        application(worker),
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
    # The worker handles signals: it is still scraped during its drain.
    server.capture_signals = contextlib.nullcontext  # type: ignore[assignment, method-assign]
    serving = asyncio.create_task(server.serve(sockets=[listening]), name="worker-port")
    announce("worker_port", host=host, port=port)
    try:
        yield
    finally:
        server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)
        listening.close()


def application(worker: Worker) -> Starlette:
    async def healthz(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def readyz(_: Request) -> Response:
        if reason := worker.unready():
            return JSONResponse({"status": "not ready", "reason": reason}, status_code=503)
        return JSONResponse({"status": "ready"})

    async def prometheus(_: Request) -> Response:
        await worker.refresh_metrics()
        return Response(metrics.exposition(), media_type=metrics.CONTENT_TYPE)

    return Starlette(routes=[Route("/healthz", healthz), Route("/readyz", readyz), Route("/metrics", prometheus)])
