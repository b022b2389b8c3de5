"""The process of one queue of chores: an rq worker without forks, and the schedule's thread."""

import asyncio
import contextlib
import signal
import threading
from collections.abc import AsyncIterator
from functools import partial
from types import FrameType

import structlog
from redis.exceptions import RedisError
from rq import SimpleWorker
from rq.exceptions import StopRequested
from rq.serializers import JSONSerializer

from api import background
from api.background import Background
from api.chores import maintenance, rq_queue
from api.chores.rq_queue import ChoreQueue
from api.chores.schedule import Schedule
from shared.config.settings import Settings
from shared.errors import RedisUnavailable
from shared.queue import Queue
from shared.runtime import log as logging
from shared.runtime.asyncio_tools import cancel_and_wait

log = structlog.get_logger()

MAINTENANCE_INTERVAL_S = 60
WORKER_TTL_S = 60  # rq's blocking read is 15 s shorter, which bounds the detection of a hung Redis
RECONNECT_S = 1.0


class RqWorker(SimpleWorker):
    """rq worker without two of rq's parts.

    Its signal handlers are installed too late for a stop during the start. Its thread for commands takes a connection,
    and can print a traceback at a stop: rq closes the connection after a second, whether the thread has ended or not.
    """

    max_connection_wait_time = 2.0
    """rq doubles its wait at each lost connection, up to 60 s, and an idle queue never resets it."""

    def _install_signal_handlers(self) -> None:
        pass

    def subscribe(self) -> None:
        pass

    def unsubscribe(self) -> None:
        pass


class ChoresWorker:
    """Runs the chores of one queue until SIGTERM; reconnects after a Redis outage."""

    def __init__(self, settings: Settings, kind: ChoreQueue) -> None:
        self._settings = settings
        self._kind = kind
        self._stopping = threading.Event()
        self._worker: RqWorker | None = None
        self._policies = Background(lambda _: _announcing(settings))

    def run(self) -> None:
        """Run until a signal; the first one lets the current chore finish, the second one stops at once."""
        signal.signal(signal.SIGTERM, self._stop)
        make_room = partial(maintenance.sweep_without_rq, self._settings) if self._kind is ChoreQueue.UPKEEP else None
        with rq_queue.connect(self._settings) as connection:
            schedule = Schedule(self._settings, connection, self._kind, make_room)
            schedule.start()
            try:
                while not self._stopping.is_set():
                    self._work()
                    self._stopping.wait(RECONNECT_S)
            finally:
                schedule.stop()
                background.close_all()
        log.info("chores_stopped", queue=self._kind.value)

    def _work(self) -> None:
        """Run one rq worker until a stop or a Redis error."""
        try:
            asyncio.run(_check_queue(self._settings))
            rq_queue.check(self._settings)
            with rq_queue.connect(self._settings) as connection:
                self._policies.run()
                self._worker = RqWorker(
                    [rq_queue.rq_queue(self._settings, connection, self._kind)],
                    connection=connection,
                    serializer=JSONSerializer,
                    worker_ttl=WORKER_TTL_S,
                    maintenance_interval=MAINTENANCE_INTERVAL_S,
                    log_job_description=False,
                )
                if not self._stopping.is_set():
                    logging.announce("chores_ready", queue=self._kind.value)
                    self._worker.work(logging_level="WARNING")
        except StopRequested:
            pass
        except (RedisError, RedisUnavailable) as error:
            log.warning("chores_redis_unavailable", queue=self._kind.value, error=str(error))
        finally:
            self._worker = None

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        self._stopping.set()
        background.stopping.set()
        if self._worker is not None:
            self._worker.request_stop(signum, frame)  # type: ignore[no-untyped-call]


async def _check_queue(settings: Settings) -> None:
    """Raise `IncompatibleRedis` for a queue that this version must not read."""
    queue = Queue.connect(settings)
    try:
        await queue.check()
    finally:
        await queue.close()


class _Announcements:
    """Announces this process' policies at each pass."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue

    async def run(self) -> int:
        return int(await self._queue.policies.try_announce("chores"))


@contextlib.asynccontextmanager
async def _announcing(settings: Settings) -> AsyncIterator[_Announcements]:
    """Keep this process' policies announced, also between passes."""
    queue = Queue.connect(settings)
    announcing = asyncio.create_task(queue.policies.keep_announced("chores"))
    try:
        yield _Announcements(queue)
    finally:
        await cancel_and_wait((announcing,))
        await queue.close()
