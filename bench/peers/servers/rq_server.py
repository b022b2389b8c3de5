"""FastAPI and rq: a route enqueues a job and waits for its result; one worker takes the jobs one by one.

Its fastest settings: Redis keeps nothing on disk, the worker forks no process per job (`SimpleWorker`), and a result
arrives by a blocking read of Redis, not by polling.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio.to_thread
import uvicorn
from fastapi import FastAPI, HTTPException
from redis import Redis
from rq import Queue, SimpleWorker

from bench.common.service import launched
from bench.peers.servers.batch_call import HOST, ROUTE, TIMEOUT_S, BatchCall, ImageRequest, PeerSettings
from cli.up.ports import reserved_port
from cli.up.redis_server import find

FIRST_REDIS_PORT = 6470
WAITING_REQUESTS = 1000
KEPT_S = 60
MODULE = "bench.peers.servers.rq_server"


@cache
def loaded() -> BatchCall:
    """Return the worker's pipeline, loaded by its first job."""
    return BatchCall(PeerSettings.from_environment().model)


def generate(request: ImageRequest) -> dict[str, Any]:
    """Run one job in the worker."""
    (response,) = loaded()([request])
    return response


def work(redis_port: int) -> None:
    """Run the worker until terminated."""
    worker = SimpleWorker([Queue(connection=Redis(HOST, redis_port))], connection=Redis(HOST, redis_port))
    worker.log_job_description = False
    worker.work(logging_level="WARNING")


@asynccontextmanager
async def many_waiting(_app: FastAPI) -> AsyncIterator[None]:
    """Let that many requests wait, each in a thread."""
    anyio.to_thread.current_default_thread_limiter().total_tokens = WAITING_REQUESTS
    yield


def application(queue: Queue) -> FastAPI:
    """Return the application that enqueues into `queue`."""
    app = FastAPI(lifespan=many_waiting)

    @app.post(ROUTE)
    def images(request: dict[str, Any]) -> Any:
        job = queue.enqueue(f"{MODULE}.generate", request, result_ttl=KEPT_S, failure_ttl=KEPT_S)
        result = job.latest_result(timeout=TIMEOUT_S)
        if result is None or result.type is not result.Type.SUCCESSFUL:
            raise HTTPException(500, f"the job failed: {result and result.exc_string}")
        return result.return_value

    return app


def serve() -> None:
    """Run Redis, the worker and the application until terminated."""
    settings = PeerSettings.from_environment()
    redis = [str(find().path), "--bind", HOST, "--save", "", "--appendonly", "no", "--port"]
    worker = [sys.executable, "-m", MODULE]
    fields = {f"peer_{name}": str(getattr(settings, name)) for name in ("model", "port", "requests", "wait_ms")}
    with (
        TemporaryDirectory() as scratch,
        reserved_port(HOST, FIRST_REDIS_PORT) as redis_port,
        launched([*redis, str(redis_port)], Path(scratch) / "redis.log", None),
        launched([*worker, str(redis_port)], Path(scratch) / "worker.log", None, **fields),
    ):
        app = application(Queue(connection=Redis(HOST, redis_port)))
        uvicorn.run(app, host=HOST, port=settings.port, log_level="warning", access_log=False)


if __name__ == "__main__":
    work(int(sys.argv[1])) if sys.argv[1:] else serve()
