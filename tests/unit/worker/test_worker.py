"""The worker's lifecycle before its first job."""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog

from shared.config.catalog import Catalog
from shared.config.model_spec import ModelSpec
from shared.config.settings import Settings
from shared.queue import Queue
from shared.storage import connect
from worker.worker import Worker


async def test_worker_that_waits_for_redis_exits_when_drained(tmp_path: Path) -> None:
    """It holds no jobs, and exits before its supervisor would kill it."""
    settings = Settings(redis_url="redis://127.0.0.1:1/0", storage_dir=tmp_path, device="cpu")
    queue, storage = Queue.connect(settings), connect(settings)
    with structlog.testing.capture_logs() as logs:
        worker = Worker(Catalog((ModelSpec(id="m", source="none"),)), queue, storage, settings)
        running = asyncio.create_task(worker.run())
        async with asyncio.timeout(10):
            while not any(line["event"] == "redis_unavailable" for line in logs):
                await asyncio.sleep(0.01)
            assert worker.unready() == "the worker is starting"
            worker.drain()
            assert worker.unready() == "the worker is draining"
            assert await running == 0
    await storage.close()
    await queue.close()
