"""A pool: how many workers it aims at, its worker processes, and the loop that starts and drains them."""

import asyncio
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from cli.up.command import logged_ready
from cli.up.supervisor import ProcessRunner, ProcessSpec, RestartBackoff, StatusPrinter
from fusequeue import AsyncClient, Busy, ClientError, Scale, Unreachable, WorkerInfo
from shared.runtime.python_command import python_command

WORKER = python_command("worker")
REMEMBERED_PIDS = 256
BACKOFF = RestartBackoff(first_s=1.0, max_s=60.0, start_attempts=None)

WorkerState = Literal["starting", "ready", "failing", "draining"]


@dataclass(frozen=True)
class PoolBounds:
    """Limits of a pool; a number of wanted workers counts for `cool_down_s`."""

    min_workers: int
    max_workers: int
    cool_down_s: float


@dataclass(frozen=True)
class WantedWorkers:
    """Workers that the service wanted at `at_s`."""

    at_s: float
    workers: int


@dataclass(frozen=True)
class PoolWorker:
    """A worker of the pool by its index from 0; `running` are its jobs, None before its first heartbeat.

    `bulk` of them are bulk jobs. A failing worker has ended more than once in a row and is not ready.
    """

    index: int
    state: WorkerState
    started_s: float
    running: int | None = None
    bulk: int = 0


@dataclass(frozen=True)
class WorkerChanges:
    """Indexes of workers to start and to drain."""

    start: tuple[int, ...] = ()
    drain: tuple[int, ...] = ()


def recent_wants(
    wants: Sequence[WantedWorkers], latest: WantedWorkers, cool_down_s: float
) -> tuple[WantedWorkers, ...]:
    """Return the wants within the cool-down that exceed all later ones, the largest first."""
    kept = [want for want in wants if latest.at_s - want.at_s < cool_down_s and want.workers > latest.workers]
    return (*kept, latest)


def target_workers(wants: Sequence[WantedWorkers], others: int, bounds: PoolBounds) -> int:
    """Return how many workers this pool aims at; `others` are workers of the service outside this pool."""
    wanted = max((want.workers for want in wants), default=0)
    return min(bounds.max_workers, max(bounds.min_workers, wanted - others))


def plan_changes(workers: Sequence[PoolWorker], target: int, max_workers: int) -> WorkerChanges:
    """Return the changes that bring the pool to `target` workers.

    A failing worker does not count: another is started if an index is free, and it is drained once enough workers are
    ready; draining it sooner would reset its restart backoff. Surplus workers are drained if idle, youngest first, then
    those with only bulk jobs: a batch would keep them for its whole window.
    """
    counted = [worker for worker in workers if worker.state in ("starting", "ready")]
    missing = target - len(counted)
    if missing > 0:
        used = {worker.index for worker in workers}
        return WorkerChanges(start=tuple(index for index in range(max_workers) if index not in used)[:missing])
    stopped = [worker for worker in counted if worker.state == "starting" or worker.running == worker.bulk]
    stopped.sort(key=lambda worker: (-worker.bulk, worker.started_s, worker.index), reverse=True)
    surplus = [worker.index for worker in stopped[: len(counted) - target]]
    enough = sum(worker.state == "ready" for worker in counted) >= target
    failing = [worker.index for worker in workers if worker.state == "failing"] if enough else []
    return WorkerChanges(drain=(*surplus, *failing))


@dataclass
class _StartedWorker:
    runner: ProcessRunner
    running: asyncio.Task[None]
    started_s: float
    draining: asyncio.Task[None] | None = None

    @property
    def ended(self) -> bool:
        return self.running.done() and (self.draining is None or self.draining.done())

    @property
    def state(self) -> WorkerState:
        if self.draining is not None:
            return "draining"
        if self.runner.failing:
            return "failing"
        return "ready" if self.runner.ready.is_set() else "starting"


@dataclass
class PoolProcesses:
    """Starts and drains workers by index; `workers_env` has the variables of each, in addition to `env`.

    A drained worker has `grace_s` to exit.
    """

    workers_env: Sequence[Mapping[str, str]]
    env: Mapping[str, str]
    log_dir: Path
    print_status: StatusPrinter
    grace_s: float
    command: tuple[str, ...] = WORKER
    _started: dict[int, _StartedWorker] = field(default_factory=dict, init=False)
    _pids: deque[int] = field(default_factory=lambda: deque(maxlen=REMEMBERED_PIDS), init=False)

    def is_ours(self, pid: int) -> bool:
        """Return whether a process is or was a worker of this pool: the service lists a killed one for a while."""
        for worker in self._started.values():
            if worker.runner.pid is not None and worker.runner.pid not in self._pids:
                self._pids.append(worker.runner.pid)
        return pid in self._pids

    def start(self, index: int) -> None:
        """Start the worker of a free index; it is restarted when it ends, until it is drained."""
        spec = ProcessSpec(
            name=f"worker-{index + 1}",
            command=self.command,
            ready=logged_ready,
            stop_rank=0,
            stop_grace_s=self.grace_s,
            env=self.workers_env[index],
            orphan_signal=signal.SIGTERM,  # Redis still runs: the worker can finish its jobs
        )
        runner = ProcessRunner(spec, self.env, self.log_dir, self.print_status, BACKOFF)
        self._started[index] = _StartedWorker(runner, asyncio.create_task(runner.run(None)), time.monotonic())

    def drain(self, index: int) -> None:
        """Let a worker finish its jobs and exit."""
        worker = self._started[index]
        if worker.draining is None:
            worker.draining = asyncio.create_task(worker.runner.stop())

    def kill(self) -> None:
        for worker in self._started.values():
            worker.runner.kill()

    def workers(self, running: Mapping[int, tuple[int, int]]) -> list[PoolWorker]:
        """Return the workers; `running` are the jobs of each process id, and how many of them are bulk.

        Frees the indexes of drained workers; raises the error of a runner that failed.
        """
        for index in [index for index, worker in self._started.items() if worker.ended]:
            self._started.pop(index).running.result()
        jobs = {index: running.get(worker.runner.pid or 0, (None, 0)) for index, worker in self._started.items()}
        return [
            PoolWorker(index, worker.state, worker.started_s, *jobs[index]) for index, worker in self._started.items()
        ]

    async def finish(self) -> None:
        """Drain all workers and return when they have exited."""
        for index in self._started:
            self.drain(index)
        workers = self._started.values()
        await asyncio.gather(*(worker.draining for worker in workers if worker.draining is not None))
        await asyncio.gather(*(worker.running for worker in workers), return_exceptions=True)
        self._started.clear()


@dataclass(frozen=True)
class PoolStatus:
    """Queued slots and running jobs of the service, and the workers of this pool by state.

    `wanted` are all workers the service wants, `target` those this pool aims at.
    """

    queued: int
    running: int
    wanted: int
    target: int
    ready: int
    starting: int
    busy: int
    draining: int
    failing: int
    reasons: tuple[str, ...]


@dataclass
class Pool:
    """Keeps as many workers on this machine as the service wants, within bounds, until it is stopped."""

    client: AsyncClient
    name: str
    processes: PoolProcesses
    bounds: PoolBounds
    poll_interval_s: float
    print_status: StatusPrinter
    _host: str = field(default_factory=socket.gethostname, init=False)
    _wants: tuple[WantedWorkers, ...] = field(default=(), init=False)
    _stopping: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _connected_once: bool = field(default=False, init=False)
    _disconnected: bool = field(default=False, init=False)

    def stop(self) -> None:
        """Begin to drain; a second call kills."""
        if self._stopping.is_set():
            self.processes.kill()
        self._stopping.set()

    async def run(self, on_status: Callable[[PoolStatus], None]) -> None:
        """Run until stopped, calling `on_status` after each poll; drains all workers before it returns or raises.

        Raises a client error if the service refuses the first poll; later errors are retried.
        """
        try:
            while not self._stopping.is_set():
                on_status(await self._adjust())
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), self.poll_interval_s)
            self.print_status("draining all workers; a second signal kills them")
        finally:
            await self.processes.finish()
        on_status(self._status(None, {}, 0))

    async def _adjust(self) -> PoolStatus:
        scale, listed = await self._poll()
        jobs = {one.pid: (one.running_jobs, one.bulk_jobs) for one in listed if one.host == self._host}
        workers = self.processes.workers(jobs)
        if scale is None:  # keep the present workers while the service is unreachable
            present = sum(worker.state in ("starting", "ready") for worker in workers)
            target = max(self.bounds.min_workers, present)
        else:
            latest = WantedWorkers(time.monotonic(), scale.wanted)
            self._wants = recent_wants(self._wants, latest, self.bounds.cool_down_s)
            others = sum(one.state != "draining" and not self._is_ours(one) for one in listed)
            target = target_workers(self._wants, others, self.bounds)
        changes = plan_changes(workers, target, self.bounds.max_workers)
        for index in changes.start:
            self.processes.start(index)
        for index in changes.drain:
            self.processes.drain(index)
        return self._status(scale, jobs, target)

    def _is_ours(self, worker: WorkerInfo) -> bool:
        return worker.host == self._host and self.processes.is_ours(worker.pid)

    def _status(self, scale: Scale | None, jobs: Mapping[int, tuple[int, int]], target: int) -> PoolStatus:
        workers = self.processes.workers(jobs)
        states = [worker.state for worker in workers]
        return PoolStatus(
            queued=0 if scale is None else scale.queued,
            running=0 if scale is None else scale.running,
            wanted=0 if scale is None else scale.wanted,
            target=target,
            ready=states.count("ready"),
            starting=states.count("starting"),
            busy=sum(bool(worker.running) for worker in workers),
            draining=states.count("draining"),
            failing=states.count("failing"),
            reasons=() if scale is None else scale.reasons,
        )

    async def _poll(self) -> tuple[Scale | None, list[WorkerInfo]]:
        try:
            scale, listed = await asyncio.gather(self.client.scale(self.name), self.client.workers())
        except ClientError as error:
            if not self._connected_once and not isinstance(error, Unreachable | Busy):
                raise
            if not self._disconnected:
                self.print_status(f"{error}; running workers continue, retrying")
            self._disconnected = True
            return None, []
        if self._disconnected:
            self.print_status("the service responds again")
        self._connected_once, self._disconnected = True, False
        return scale, listed
