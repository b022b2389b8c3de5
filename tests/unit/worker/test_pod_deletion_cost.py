"""The deletion cost of a worker's pod, written to an API server over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from shared.config.settings import Settings
from shared.errors import ConfigurationError
from shared.job import Job
from shared.job_fields import Priority
from worker.metrics.pod_deletion_cost import ANNOTATION, keep_current, pod_deletion_cost

Eventually = Callable[..., Awaitable[None]]

POD_PATH = "/api/v1/namespaces/gpus/pods/worker-1"


class ApiServer:
    """A Kubernetes API server with one pod that accepts merge patches with the right token."""

    def __init__(self) -> None:
        self.url = ""
        self.token = "first"
        self.forbidden = False
        self.refused = 0
        self.costs: list[str] = []

    async def patch(self, request: Request) -> Response:
        if request.headers.get("authorization") != f"Bearer {self.token}":
            self.refused += 1
            return JSONResponse({"reason": "Unauthorized"}, status_code=401)
        if request.headers.get("content-type") != "application/merge-patch+json":
            return JSONResponse({"reason": "UnsupportedMediaType"}, status_code=415)
        if self.forbidden:
            self.refused += 1
            return JSONResponse({"reason": "Forbidden"}, status_code=403)
        body: dict[str, Any] = await request.json()
        assert list(body) == ["metadata"]
        assert list(body["metadata"]) == ["annotations"], "nothing else of the pod changes"
        self.costs.append(body["metadata"]["annotations"][ANNOTATION])
        return JSONResponse({})


class WorkerStub:
    def __init__(self, *jobs: Job) -> None:
        self.jobs = list(jobs)


@pytest.fixture
async def api_server(eventually: Eventually) -> AsyncIterator[ApiServer]:
    server_stub = ApiServer()
    app = Starlette(routes=[Route(POD_PATH, server_stub.patch, methods=["PATCH"])])
    server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", log_config=None, access_log=False))
    server.capture_signals = contextlib.nullcontext  # type: ignore[assignment, method-assign]
    serving = asyncio.create_task(server.serve())
    await eventually(lambda: server.started, "the API server is up")
    server_stub.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    yield server_stub
    server.should_exit = True
    await serving


@contextlib.asynccontextmanager
async def keeping(api_server: ApiServer, worker: WorkerStub, token: Path, **options: float) -> AsyncIterator[None]:
    async with httpx.AsyncClient(base_url=api_server.url, timeout=5, trust_env=False) as client:
        task = asyncio.create_task(keep_current(client, POD_PATH, token, worker, **options))
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_cost_follows_the_jobs(
    api_server: ApiServer,
    tmp_path: Path,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
    make_job: Callable[..., Job],
) -> None:
    """Written only when it changes; the token is read for each write, since Kubernetes renews it."""
    monkeypatch.setattr("worker.metrics.pod_deletion_cost.CHECK_EVERY_S", 0.01)
    worker, token = WorkerStub(), tmp_path / "token"
    token.write_text("first\n")
    async with keeping(api_server, worker, token, write_every_s=0.02):
        await eventually(lambda: api_server.costs == ["0"], "an idle worker is removed first")
        api_server.token = "second"
        token.write_text("second\n")
        worker.jobs = [make_job(n=8, priority=Priority.BULK)]
        await eventually(lambda: api_server.costs == ["0", "8"], "a worker with bulk jobs costs little")
        await asyncio.sleep(0.1)
        worker.jobs += [make_job(n=2)]
        await eventually(lambda: api_server.costs == ["0", "8", "2008"], "a busy worker is kept")
        worker.jobs = []
        await eventually(
            lambda: api_server.costs == ["0", "8", "2008", "0"], "nothing was written while nothing changed"
        )


async def test_cost_is_written_after_refusals(
    api_server: ApiServer,
    tmp_path: Path,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
    make_job: Callable[..., Job],
) -> None:
    """A failed write is retried with the current cost; the worker continues."""
    monkeypatch.setattr("worker.metrics.pod_deletion_cost.RETRY_AFTER_S", 0.01)
    worker, token = WorkerStub(make_job(n=3, priority=Priority.BULK)), tmp_path / "token"
    api_server.forbidden = True
    token.write_text("expired")
    async with keeping(api_server, worker, token):
        await eventually(lambda: api_server.refused >= 2, "a wrong token is refused")
        token.write_text("first")
        before = api_server.refused
        await eventually(lambda: api_server.refused > before, "a token without permission is refused")
        assert api_server.costs == []
        api_server.forbidden = False
        await eventually(lambda: api_server.costs == ["3"], "it is written once permitted")


async def test_setting_is_refused_outside_of_kubernetes(tmp_path: Path) -> None:
    """The error names what is missing."""
    async with pod_deletion_cost(Settings(), WorkerStub(), {}):
        pass  # disabled by default
    settings = Settings(pod_name="worker-1")
    with pytest.raises(ConfigurationError, match="KUBERNETES_SERVICE_HOST"):
        async with pod_deletion_cost(settings, WorkerStub(), {}, tmp_path):
            pass
    with pytest.raises(ConfigurationError, match="automountServiceAccountToken"):
        async with pod_deletion_cost(settings, WorkerStub(), {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, tmp_path):
            pass
