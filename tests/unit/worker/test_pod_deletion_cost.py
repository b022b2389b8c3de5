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
from worker.metrics.pod_deletion_cost import ANNOTATION, DeletionCost, pod_deletion_cost

Eventually = Callable[..., Awaitable[None]]


class Cluster:
    """An API server that knows one pod and takes merge patches of it, from whoever bears the token."""

    def __init__(self) -> None:
        self.url = ""
        self.token = "first"
        self.refuse = False
        self.refused = 0
        self.costs: list[str] = []

    async def patch(self, request: Request) -> Response:
        if request.headers.get("authorization") != f"Bearer {self.token}":
            self.refused += 1
            return JSONResponse({"reason": "Unauthorized"}, status_code=401)
        if request.headers.get("content-type") != "application/merge-patch+json":
            return JSONResponse({"reason": "UnsupportedMediaType"}, status_code=415)
        if self.refuse:
            self.refused += 1
            return JSONResponse({"reason": "Forbidden"}, status_code=403)
        body: dict[str, Any] = await request.json()
        assert list(body) == ["metadata"]
        assert list(body["metadata"]) == ["annotations"], "nothing else of the pod is touched"
        self.costs.append(body["metadata"]["annotations"][ANNOTATION])
        return JSONResponse({})


class Worker:
    slots_in_use = 0


@pytest.fixture
async def cluster(eventually: Eventually) -> AsyncIterator[Cluster]:
    made = Cluster()
    app = Starlette(routes=[Route("/api/v1/namespaces/gpus/pods/worker-1", made.patch, methods=["PATCH"])])
    server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", log_config=None, access_log=False))
    server.capture_signals = contextlib.nullcontext  # type: ignore[assignment, method-assign]
    serving = asyncio.create_task(server.serve())
    await eventually(lambda: server.started, "the API server is up")
    made.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    yield made
    server.should_exit = True
    await serving


@contextlib.asynccontextmanager
async def keeping(cluster: Cluster, worker: Worker, token: Path, **options: float) -> AsyncIterator[None]:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=5, trust_env=False) as client:
        task = asyncio.create_task(DeletionCost(client, "gpus", "worker-1", token).keep_current(worker, **options))
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_the_cost_follows_what_the_worker_has_in_hand(
    cluster: Cluster, tmp_path: Path, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written when it changes and not otherwise; the token is read anew, since Kubernetes renews it."""
    monkeypatch.setattr("worker.metrics.pod_deletion_cost.CHECK_EVERY_S", 0.01)
    worker, token = Worker(), tmp_path / "token"
    token.write_text("first\n")
    async with keeping(cluster, worker, token, write_every_s=0.02):
        await eventually(lambda: cluster.costs == ["0"], "an idle worker is the first to go")
        cluster.token = "second"
        token.write_text("second\n")
        worker.slots_in_use = 8
        await eventually(lambda: cluster.costs == ["0", "8"], "a busy one is not")
        await asyncio.sleep(0.1)
        worker.slots_in_use = 0
        await eventually(lambda: cluster.costs == ["0", "8", "0"], "nothing was written while nothing changed")


async def test_a_refusal_does_not_end_it(
    cluster: Cluster, tmp_path: Path, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again later, with what then is so: a worker does not fall with its annotation."""
    monkeypatch.setattr("worker.metrics.pod_deletion_cost.RETRY_AFTER_S", 0.01)
    worker, token = Worker(), tmp_path / "token"
    cluster.refuse = True
    worker.slots_in_use = 3
    token.write_text("expired")
    async with keeping(cluster, worker, token):
        await eventually(lambda: cluster.refused >= 2, "a token that is none is refused")
        token.write_text("first")
        before = cluster.refused
        await eventually(lambda: cluster.refused > before, "one that may not is refused as well")
        assert cluster.costs == []
        cluster.refuse = False
        await eventually(lambda: cluster.costs == ["3"], "it is written once it may be")


async def test_outside_of_kubernetes_the_setting_is_refused(tmp_path: Path) -> None:
    """It names what is missing, rather than fail later and silently."""
    async with pod_deletion_cost(Settings(), Worker(), {}):
        pass  # off unless set
    settings = Settings(pod_name="worker-1")
    with pytest.raises(ConfigurationError, match="KUBERNETES_SERVICE_HOST"):
        async with pod_deletion_cost(settings, Worker(), {}, tmp_path):
            pass
    with pytest.raises(ConfigurationError, match="automountServiceAccountToken"):
        async with pod_deletion_cost(settings, Worker(), {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, tmp_path):
            pass
