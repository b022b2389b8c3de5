"""`python -m worker`: one worker process, for one device."""

import asyncio
import os
import signal
import sys

import structlog
import uvloop

from shared.config import models_file, settings
from shared.config.settings import Settings
from shared.errors import FusequeueError
from shared.queue import Queue
from shared.runtime import log, tracing
from shared.runtime.allocator import return_freed_memory
from shared.storage import connect
from worker.metrics.http_port import http_port
from worker.metrics.pod_deletion_cost import pod_deletion_cost
from worker.worker import Worker


async def run_worker(configured: Settings) -> int:
    """Work until SIGTERM or SIGINT, then drain; return the exit status."""
    models = models_file.load(configured.models, configured.batch_rules)
    queue, storage = Queue.connect(configured), connect(configured)
    try:
        worker = Worker(models, queue, storage, configured)
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, worker.drain)
        async with http_port(configured, worker), pod_deletion_cost(configured, worker, os.environ):
            return await worker.run()
    finally:
        await storage.close()
        await queue.close()


def main() -> int:
    return_freed_memory()
    try:
        configured = settings.load()
        settings.withhold_permissions(configured)
        log.configure(configured.log_level)
        for message in settings.unknown_variables(os.environ):
            structlog.get_logger().warning("setting_unknown", message=message)
        tracing.configure(configured.traces, "fusequeue-worker")
        return uvloop.run(run_worker(configured))
    except FusequeueError as error:
        structlog.get_logger().error("worker_failed", code=error.code, error=error.message)
        return 1
    except Exception:
        structlog.get_logger().exception("worker_crashed", remedy="none: its jobs are reclaimed after their leases")
        return 1
    finally:
        tracing.close()


if __name__ == "__main__":
    sys.exit(main())
