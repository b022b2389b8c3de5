"""A chores worker: rq's, in one process without forks, and the schedule beside it."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

import structlog
from redis.exceptions import RedisError
from rq import SimpleWorker
from rq.exceptions import StopRequested
from rq.serializers import JSONSerializer

from shared.config import settings
from shared.config.settings import Settings
from shared.errors import FusequeueError
from shared.runtime import log as logging
from worker.chores import rq_queue
from worker.chores.schedule import Schedule

log = structlog.get_logger()

MAINTENANCE_INTERVAL_S = 60
WORKER_TTL_S = 60  # rq blocks on its line for 15 s less, which also bounds how long a hung Redis goes unnoticed
COME_BACK_S = 1.0


class RqWorker(SimpleWorker):
    """rq's worker under signal handlers of ours: its own are set too late to notice a stop while it starts."""

    def _install_signal_handlers(self) -> None:
        pass


class ChoresWorker:
    """Runs chores until SIGTERM or SIGINT, and comes back by itself when Redis does."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._stopping = threading.Event()
        self._worker: RqWorker | None = None

    def run(self) -> None:
        """Work until told to stop; the chore in hand is finished first, and a second signal ends it at once."""
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, self._stop)
        with rq_queue.connect(self._settings) as connection:
            schedule = Schedule(self._settings, connection)
            schedule.start()
            try:
                while not self._stopping.is_set():
                    self._work()
                    self._stopping.wait(COME_BACK_S)
            finally:
                schedule.stop()
        log.info("chores_stopped")

    def _work(self) -> None:
        """Run one rq worker until it is told to stop, or gives up because Redis failed it."""
        try:
            with rq_queue.connect(self._settings) as connection:
                connection.ping()
                self._worker = RqWorker(
                    [rq_queue.line(self._settings, connection)],
                    connection=connection,
                    serializer=JSONSerializer,
                    worker_ttl=WORKER_TTL_S,
                    maintenance_interval=MAINTENANCE_INTERVAL_S,
                    log_job_description=False,
                )
                if not self._stopping.is_set():
                    logging.announce("chores_ready", line=rq_queue.name(self._settings.namespace))
                    self._worker.work(logging_level="WARNING")
        except StopRequested:
            pass
        except RedisError as error:
            log.warning("chores_wait_for_redis", error=str(error))
        finally:
            self._worker = None

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        self._stopping.set()
        if self._worker is not None:
            self._worker.request_stop(signum, frame)  # type: ignore[no-untyped-call]


def main() -> int:
    """Run a chores worker and return the exit status; an error of the set-up is told in one line."""
    try:
        configured = settings.load()
        logging.configure(configured.log_level)
        for told in settings.unknown_variables(os.environ):
            log.warning("setting_unknown", told=told)
        ChoresWorker(configured).run()
    except FusequeueError as error:
        log.error("chores_stopped", code=error.code, error=error.message)
        return 1
    return 0
