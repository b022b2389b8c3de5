"""Two workers and three models, of which each worker can hold one: few loads, and all jobs succeed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import structlog
from harness.engine import a_job, a_spec
from harness.queue import a_moment, put

from shared.config.catalog import Catalog
from shared.job import State
from shared.queue import Queue, Submission
from shared.signature import signature
from shared.storage import connect
from worker.engine.engine import Engine
from worker.engine.pipelines.loading import locate
from worker.worker import Worker

MODELS = ("one", "two", "three")
JOBS_EACH = 8
ROWS = 2


@pytest.mark.usefixtures("quick_loads")
async def test_workers_with_several_models_need_few_loads(
    queue_with: Callable[..., Queue], tiny_models: Path, tmp_path: Path, eventually: Callable[..., Awaitable[None]]
) -> None:
    """24 jobs arrive, alternating between models: in order of readiness nearly each of 12 batches would load a model.

    Expected: two loads at the start, one or two for each other model, and a few by workers with nothing else to do.
    """
    queue = queue_with(overdue_ms=50)
    specs = tuple(a_spec(tiny_models / "sd", model, max_batch=ROWS) for model in MODELS)
    _, nbytes = locate(specs[0])
    settings = queue.client.settings.model_copy(
        update={
            "storage_dir": tmp_path,
            "device": "cpu",
            "torch_threads": 1,
            "drain_timeout_s": 60.0,
            "gpu_memory_bytes": nbytes * 3 // 2,
        }
    )
    jobs = [a_job(f"{model}-{number}", model=model, steps=2) for number in range(JOBS_EACH) for model in MODELS]
    for job in jobs:
        await put(queue, Submission(job, signature(job), 0, ROWS))
        await a_moment(1)  # the arrival times of the models differ by less than a batch
    storage = connect(settings)

    async def all_ended() -> bool:
        records = await queue.jobs.get_many([job.id for job in jobs])
        return all(record is not None and record.state.terminal for record in records)

    async def registered() -> bool:
        infos = await queue.workers.all()
        return len(infos) == 2 and all(
            (info.device, info.models, len(info.loaded), info.running_jobs, info.running_slots)
            == ("cpu", MODELS, 1, 0, 0)
            and info.memory_bytes > info.models_bytes > 0
            for info in infos
        )

    with structlog.testing.capture_logs() as logs:
        workers = [Worker(Catalog(specs), queue, storage, settings, Engine) for _ in range(2)]
        running = [asyncio.create_task(worker.run()) for worker in workers]
        await eventually(all_ended, "all jobs have ended", 120)
        await eventually(registered, "heartbeats describe both workers", 10)
        for worker in workers:
            worker.drain()
        assert await asyncio.gather(*running) == [0, 0]
    await storage.close()
    records = await queue.jobs.get_many([job.id for job in jobs])
    assert Counter(record.state for record in records if record) == {State.SUCCEEDED: len(jobs)}
    loads = [line["model"] for line in logs if line["event"] == "model_loaded"]
    assert set(loads) == set(MODELS)
    assert not any(line["event"] == "model_unavailable" for line in logs), "a lack of memory at the start is no failure"
    assert len(loads) <= 8, loads
