"""`python -m worker`: one worker process, for one device."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import structlog

from shared.config import models_file, settings
from shared.config.settings import Settings
from shared.errors import FusequeueError
from shared.queue import Queue
from shared.runtime import log
from shared.storage import connect
from worker.metrics import pod_deletion_cost
from worker.metrics.http_port import answering
from worker.worker import Worker


async def serve(configured: Settings) -> int:
    """Work until SIGTERM or SIGINT, then drain; returns the exit status."""
    models = models_file.load(configured.models, configured.batch_rules)
    queue = Queue.connect(configured)
    storage = connect(configured)
    try:
        worker = Worker(models, queue, storage, configured)
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, worker.drain)
        async with answering(configured, worker), pod_deletion_cost.cost_kept(configured, worker, os.environ):
            return await worker.run()
    finally:
        await storage.close()
        await queue.close()


def main() -> int:
    """Run one worker; an error of the set-up is told in one line."""
    try:
        configured = settings.load()
        log.configure(configured.log_level)
        for told in settings.unknown_variables(os.environ):
            structlog.get_logger().warning("setting_unknown", told=told)
        return asyncio.run(serve(configured))
    except FusequeueError as error:
        structlog.get_logger().error("worker_stopped", code=error.code, error=error.message)
        return 1
    except Exception:
        structlog.get_logger().exception("worker_crashed", remedy="its jobs are claimed again after their leases")
        return 1


if __name__ == "__main__":
    sys.exit(main())
