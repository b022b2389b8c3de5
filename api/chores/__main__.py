"""`python -m api.chores`: one process per queue of chores, below one that supervises them."""

import importlib
import os
import sys

from shared.runtime.imports import importing

with importing():
    import structlog

    from api.chores.child_processes import EXIT_CONFIGURATION, ChildProcesses
    from api.chores.rq_queue import ChoreQueue
    from api.chores.rq_worker import ChoresWorker
    from api.chores.schedule import PERIODIC
    from shared.config import settings
    from shared.config.settings import Settings
    from shared.errors import FusequeueError
    from shared.runtime import log as logging
    from shared.runtime import tracing
    from shared.runtime.allocator import return_freed_memory

    for chores in PERIODIC.values():  # imported before the forks, which share their memory
        for chore in chores:
            importlib.import_module(chore.function.rpartition(".")[0])

log = structlog.get_logger()


def _work(configured: Settings, kind: ChoreQueue) -> int:
    try:
        tracing.configure(configured.traces, "fusequeue-chores")  # its thread does not survive a fork
        ChoresWorker(configured, kind).run()
    except FusequeueError as error:
        log.error("chores_failed", queue=kind.value, code=error.code, error=error.message)
        return EXIT_CONFIGURATION
    finally:
        tracing.close()
    return 0


def main() -> int:
    """Run the chores and return the exit status; logs a configuration error in one line."""
    return_freed_memory()
    try:
        configured = settings.load()
        settings.withhold_permissions(configured)
        logging.configure(configured.log_level)
        tracing.require(configured.traces)  # imported before the forks, which share its memory
        for message in settings.unknown_variables(os.environ):
            log.warning("setting_unknown", message=message)
    except FusequeueError as error:
        log.error("chores_failed", code=error.code, error=error.message)
        return EXIT_CONFIGURATION
    return ChildProcesses([kind.value for kind in ChoreQueue], lambda name: _work(configured, ChoreQueue(name))).run()


if __name__ == "__main__":
    sys.exit(main())
