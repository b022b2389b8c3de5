"""`python -m worker`: one worker process, for one device."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial

from shared.runtime.imports import importing

with importing():
    import structlog
    import uvloop

    from shared.config import models_file, settings
    from shared.config.catalog import Catalog
    from shared.config.settings import Settings
    from shared.errors import FusequeueError
    from shared.runtime import log, tracing
    from shared.runtime.allocator import return_freed_memory
    from worker.engine import unusable_compile_cache
    from worker.engine.protocol import EngineFactory
    from worker.engine.remote import EngineProcess, RemoteEngine
    from worker.engine.weights.packages import unused_packages


def start_engine(models: Catalog) -> EngineFactory:
    """Start a process that imports the engine's libraries, and return what makes the engine in it."""
    return partial(RemoteEngine, process=EngineProcess(unused_packages(models)))


async def run_worker(configured: Settings, models: Catalog, engine: EngineFactory) -> int:
    """Work until SIGTERM or SIGINT, then drain; return the exit status."""
    with importing():  # while the engine's process imports its libraries, which takes several times as long
        from shared.config.models_watch import ModelsWatch
        from shared.queue import Queue
        from shared.storage import connect
        from worker.worker import Worker
    queue, storage = Queue.connect(configured), connect(configured)
    try:
        watch = ModelsWatch(configured.models, configured.batch_rules)
        worker = Worker(models, queue, storage, configured, engine, watch)
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, worker.drain)
        async with AsyncExitStack() as stack:
            if configured.worker_port is not None:
                from worker.metrics.http_port import http_port  # and with it a web server

                await stack.enter_async_context(http_port(configured.worker_host, configured.worker_port, worker))
            return await worker.run()
    finally:
        await storage.close()
        await queue.close()


def main(start: Callable[[Catalog], EngineFactory] = start_engine) -> int:
    """Run one worker, and return the exit status; errors are logged in one line."""
    return_freed_memory()
    try:
        configured = settings.load()
        settings.withhold_permissions(configured)
        log.configure(configured.log_level)
        for message in settings.unknown_variables(os.environ):
            structlog.get_logger().warning("setting_unknown", message=message)
        if unusable_compile_cache:
            structlog.get_logger().warning("compile_cache_unusable", reason=unusable_compile_cache)
        tracing.configure(configured.traces, "fusequeue-worker")
        models = models_file.load(configured.models, configured.batch_rules)
        return uvloop.run(run_worker(configured, models, start(models)))
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
