"""A worker during a Redis outage, and with missing models."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from harness.engine import a_job, a_spec
from harness.ports import free_port
from harness.queue import put

from shared.config.catalog import Catalog
from shared.config.settings import Settings
from shared.errors import RedisUnavailable
from shared.job import Job, State
from shared.job_record import JobRecord
from shared.queue import Queue, Submission
from shared.signature import signature
from shared.storage import connect
from worker.engine.engine import Engine
from worker.engine.fusion import fused_call
from worker.metrics.http_port import http_port
from worker.worker import Worker

Eventually = Callable[..., Awaitable[None]]
STEPS = 120
FORWARD_S = 0.1  # of the steps, until the outage is over: longer in all than it takes to be noticed


async def submit(queue: Queue, *jobs: Job) -> None:
    await put(queue, *(Submission(job, signature(job), 0, 1) for job in jobs))


async def record_or_none(queue: Queue, name: str) -> JobRecord | None:
    """Return a job's record; None while Redis is unavailable."""
    try:
        return await queue.jobs.get(name)
    except RedisUnavailable:
        return None


@pytest.mark.usefixtures("quick_loads")
async def test_worker_continues_its_forwards_during_a_redis_outage_and_claims_afterwards(
    durable_server: Any,
    settings_for: Callable[..., Settings],
    tiny_models: Path,
    tmp_path: Path,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Redis is killed during a job and restarted: no step is computed twice, and the queued job runs afterwards."""
    forward, over = fused_call.run_fused, threading.Event()
    made = 0

    def slow_forward(*calls: Any) -> list[Any]:
        nonlocal made
        made += 1
        over.wait(FORWARD_S)
        return forward(*calls)

    monkeypatch.setattr(fused_call, "run_fused", slow_forward)
    settings = settings_for(
        durable_server.url, storage_dir=tmp_path / "storage", device="cpu", torch_threads=1, drain_timeout_s=60.0
    )
    queue, storage = Queue.connect(settings), connect(settings)
    worker = Worker(Catalog((a_spec(tiny_models / "sd", max_batch=1),)), queue, storage, settings, Engine)
    await submit(queue, a_job("runs", steps=STEPS), a_job("waits", steps=2))
    running = asyncio.create_task(worker.run())

    await eventually(lambda: made > 5, "the job runs", 60)
    durable_server.kill()
    at_outage = made
    await eventually(lambda: worker.unready() is not None, "the worker is not ready", 30)
    assert "heartbeat" in (worker.unready() or "")
    assert made > at_outage + 5, "forwards continue"
    assert worker.slots_in_use == 1, "no further job is claimed"
    durable_server.start()
    await eventually(lambda: worker.unready() is None, "the worker is ready again", 30)
    over.set()

    async def both_ended() -> bool:
        records = [await record_or_none(queue, name) for name in ("runs", "waits")]
        return all(record is not None and record.state.terminal for record in records)

    await eventually(both_ended, "both jobs ended", 90)
    records = [await queue.jobs.get(name) for name in ("runs", "waits")]
    worker.drain()
    assert await running == 0
    await storage.close()
    await queue.close()
    assert [record and (record.state, record.attempts) for record in records] == [(State.SUCCEEDED, 1)] * 2
    assert [record and record.batching.forwards for record in records] == [STEPS, 2]


async def test_worker_without_a_loadable_model_is_not_ready(
    queue: Queue, tmp_path: Path, eventually: Eventually
) -> None:
    """The readiness response and the log name the model and its folder; jobs fail."""
    port = free_port()
    settings = queue.client.settings.model_copy(
        update={"storage_dir": tmp_path / "storage", "device": "cpu", "worker_port": port, "drain_timeout_s": 5.0}
    )
    storage = connect(settings)
    (tmp_path / "other").mkdir()
    with structlog.testing.capture_logs() as logs:
        worker = Worker(Catalog((a_spec(tmp_path / "nowhere"),)), queue, storage, settings, Engine)
        running = asyncio.create_task(worker.run())
        await eventually(lambda: any(line["event"] == "models_unavailable" for line in logs), "the load failed", 60)
        async with (
            http_port("127.0.0.1", port, worker),
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
        ):
            responses: list[httpx.Response] = []

            async def reports_models() -> bool:
                responses.append(await client.get("/readyz", timeout=10))
                return "no model" in responses[-1].json()["reason"]

            # The first load imports torch in this process, which can delay heartbeats.
            await eventually(reports_models, "it is not ready, because of its models", 30)
        response = responses[-1]
        await submit(queue, a_job("refused"))

        async def refused() -> bool:
            record = await queue.jobs.get("refused")
            return record is not None and record.state is State.FAILED

        await eventually(refused, "the job failed", 30)
        worker.drain()
        assert await running == 0
    await storage.close()
    assert response.status_code == 503
    logged = next(line["reason"] for line in logs if line["event"] == "models_unavailable")
    for reason in (response.json()["reason"], logged):
        assert "no model can be loaded: model 'tiny'" in reason
        assert "nowhere" in reason
