"""Everything of `fusequeue up`: the processes it starts, their order, and how it stops."""

import asyncio
import os
import secrets
import shlex
import signal
import socket
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import httpx

from cli.findings import FAILED, little_space
from cli.model_checks import model_findings
from cli.up import cores, environment, folder_lock, ports, redis_server
from cli.up.child_process import Process
from cli.up.supervisor import ProcessSpec, StartFailed, Supervisor
from cli.worker_packages import require_worker_packages
from shared.config import models_file
from shared.config.settings import Settings
from shared.errors import ConfigurationError
from shared.runtime.python_command import python_command

WORKER_RANK, CHORES_RANK, API_RANK, REDIS_RANK = range(4)
AFTER_DRAIN_S = 15.0  # for a worker: 5 s for the last checkpoints, 10 s to release jobs while Redis is away
STOP_GRACE_S = 10.0
API_GRACE_S = 30.0  # the API allows 20 s for open requests
KEY_REQUIRED = (401, 403)
PARTS = ("logs", "pool", "redis", "storage")


def print_status(line: str) -> None:
    """Print a status line to stderr, if it can still be written; stdout has only the ready line."""
    with suppress(OSError):  # the terminal was closed, or the other end of the pipe: a stop goes on
        print(line, file=sys.stderr, flush=True)


def print_ready(url: str) -> None:
    """Print the ready line to stdout, if it can still be written: the processes keep running without it."""
    try:
        print(f"ready {url}", flush=True)
    except OSError:
        # Python flushes stdout again when it exits, and would fail then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


async def up(
    host: str,
    port: int,
    data_dir: Path,
    api_workers: int,
    workers: int,
    models: Path | None,
    settings: Settings,
    environ: Mapping[str, str],
) -> int:
    """Run all processes until a signal and return the exit status; raises `ConfigurationError` before any starts."""
    models = environment.models_path(models, environ)
    specs = models_file.load(models)
    if workers:
        require_worker_packages("; without workers: --workers 0")
    with locked(data_dir), ExitStack() as reservations:
        wanted, port = port, reservations.enter_context(ports.reserved_port(host, port))
        url = f"http://{reachable(host)}:{port}"
        if port != wanted:
            print_status(f"port {wanted} is taken; the API uses {port}. For clients: export FUSEQUEUE_URL={url}")
        env = environment.child_environment(data_dir, workers * specs.devices, models, settings, environ)
        processes: list[ProcessSpec] = []
        with writing_to(data_dir):
            if "FUSEQUEUE_REDIS_URL" not in environ:
                remedy = "set FUSEQUEUE_REDIS_URL to another Redis"
                reservation = ports.reserved_port(redis_server.HOST, redis_server.FIRST_PORT, remedy)
                redis, env["FUSEQUEUE_REDIS_URL"] = redis_process(data_dir, reservations.enter_context(reservation))
                processes.append(redis)
            environment.record(data_dir, env, url, own_redis=bool(processes))
        print_status(f"models: {', '.join(spec.id for spec in specs)} ({models}); data and logs: {data_dir}")
        for line in (*disk_faults(data_dir), *model_faults(models)):
            print_status(line)
        async with httpx.AsyncClient(base_url=url, timeout=5.0, trust_env=False) as client:
            workers_env = environment.worker_environments(workers, env, specs.devices)
            needs, probes = "redis" if processes else None, Probes(client)
            processes += api_processes(host, port, environment.api_environments(api_workers, env), probes, needs)
            processes += worker_processes(probes, settings.drain_timeout_s, workers_env, needs)
            with writing_to(data_dir):
                supervisor = Supervisor(processes, env=env, log_dir=data_dir / "logs", print_status=print_status)

            def on_ready() -> None:
                if probes.keyless and settings.auth == "auto":
                    print_status(first_key(data_dir))
                print_ready(url)

            placing = asyncio.create_task(cores.keep_free(supervisor.pids, least=api_workers))
            try:
                return await supervise(supervisor, on_ready)
            finally:
                placing.cancel()
                await asyncio.gather(placing, return_exceptions=True)


def model_faults(models: Path) -> Iterator[str]:
    """Yield a line for each model that no worker can load, and what to do; the others are served."""
    for finding in model_findings(models):
        if finding.verdict is FAILED:
            yield f"{finding.name} failed: {finding.seen}; {finding.remedy}"


def disk_faults(data_dir: Path) -> Iterator[str]:
    """Yield a line if the disk of `data_dir` is nearly full, and what to do."""
    if little := little_space(data_dir):
        yield f"{data_dir}: {little}; free disk space, or choose another --data-dir"


def first_key(data_dir: Path) -> str:
    """Return how to create the first key."""
    command = shlex.join(["fusequeue", "keys", "create", "--data-dir", str(data_dir)])
    return f"no API keys yet: every program on this machine can use the API. To require keys: {command}"


async def supervise(supervisor: Supervisor, on_ready: Callable[[], None]) -> int:
    """Run until SIGINT, SIGTERM or SIGHUP; a second signal kills."""
    try:
        with on_stop_signal(supervisor.stop):
            await supervisor.run(on_ready)
    except StartFailed as error:
        print_status(str(error))
        return 1
    print_status("stopped")
    return 0


@contextmanager
def on_stop_signal(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on each SIGINT, SIGTERM and, except under nohup, SIGHUP."""
    loop = asyncio.get_running_loop()
    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    for number in signals:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


@contextmanager
def writing_to(data_dir: Path) -> Iterator[None]:
    """Turn a file system error into a `ConfigurationError` that names the option to change."""
    try:
        yield
    except OSError as error:
        raise ConfigurationError(
            f"{error.filename or data_dir}: {error.strerror or error}; --data-dir must name a writable folder"
        ) from error


@contextmanager
def locked(data_dir: Path) -> Iterator[None]:
    """Lock `data_dir` for this process; raises `ConfigurationError` while another process holds it."""
    with writing_to(data_dir):
        data_dir.mkdir(parents=True, exist_ok=True)
        withhold_parts(data_dir)
        lock = folder_lock.lock(data_dir / "lock", "--data-dir")
    with lock:
        yield


def withhold_parts(data_dir: Path) -> None:
    """Take from the folders of an earlier version in `data_dir` the permissions that new ones do not get.

    `data_dir` itself keeps its own: it can be a folder that others use too.
    """
    umask = os.umask(0o077)
    os.umask(umask)
    for part in (data_dir / name for name in PARTS):
        if part.is_dir() and not part.is_symlink() and part.stat().st_mode & umask:
            part.chmod(stat.S_IMODE(part.stat().st_mode) & ~umask)
            print_status(f"{part}: permissions of others removed")


def reachable(host: str) -> str:
    """Return `host` as a client on this machine writes it in a URL."""
    if host in ("0.0.0.0", "::", ""):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


@dataclass
class Probes:
    """Readiness checks of the started processes; `client` has the API's base URL. `keyless`: it required no key."""

    client: httpx.AsyncClient
    keyless: bool = False

    async def api(self, process: Process) -> bool:
        """Return whether the process serves, and the API accepts jobs."""
        if not process.log.ready:
            return False
        response = await self._get("/readyz")
        if response is None or not response.is_success:
            return False
        listed = await self._get("/v1/workers")
        self.keyless = listed is not None and listed.is_success
        return True

    async def worker(self, process: Process) -> bool:
        """Return whether the worker has loaded its models, or repeats loads that failed, and sends heartbeats."""
        if not process.log.ready:
            return False
        response = await self._get("/v1/workers")
        if response is None:
            return False
        if response.status_code in KEY_REQUIRED:  # the list needs an admin key: rely on the worker's log
            return True
        host, workers = socket.gethostname(), response.json()["data"]
        states = [worker["state"] for worker in workers if (worker["host"], worker["pid"]) == (host, process.pid)]
        return any(state in ("ready", "unavailable") for state in states)

    async def _get(self, path: str) -> httpx.Response | None:
        try:
            response = await self.client.get(path)
        except httpx.HTTPError:
            return None
        return response if response.is_success or response.status_code in KEY_REQUIRED else None


async def logged_ready(process: Process) -> bool:
    """Readiness check for a process without an HTTP interface: its log."""
    return process.log.ready


def redis_process(data_dir: Path, port: int) -> tuple[ProcessSpec, str]:
    """Return the embedded redis-server on `port` and its URL."""
    server = redis_server.find()
    password = secrets.token_urlsafe(24)
    command = redis_server.configure(server, data_dir / "redis", port, password)
    print_status(f"redis: {server} on port {port}")
    spec = ProcessSpec(
        name="redis",
        command=command,
        ready=lambda _: redis_server.responds(port, password),
        stop_rank=REDIS_RANK,
        stop_grace_s=STOP_GRACE_S,
        # Redis writes its data on SIGTERM, also when this supervisor was killed.
        orphan_signal=signal.SIGTERM,
    )
    return spec, f"redis://:{password}@{redis_server.HOST}:{port}/0"


def api_processes(
    host: str, port: int, environments: Sequence[Mapping[str, str]], probes: Probes, needs: str | None
) -> list[ProcessSpec]:
    """Return an API process for each of `environments`; several share listening sockets, which are opened here.

    A single one opens its own: while it restarts, connections are refused at once.
    """
    command = python_command("api", "--host", host, "--port", str(port))
    spec = ProcessSpec("api", command, probes.api, API_RANK, API_GRACE_S, needs)
    if len(environments) == 1:
        return [replace(spec, env=environments[0])]
    listeners = ports.listen(host, port)
    descriptors = tuple(listener.fileno() for listener in listeners)
    options = (option for number in descriptors for option in ("--listener", str(number)))
    spec = replace(
        spec,
        command=(*command, *options),
        descriptors=descriptors,
        on_stop=partial(ports.close, listeners),
    )
    return [replace(spec, name=f"api-{number}", env=env) for number, env in enumerate(environments, 1)]


def worker_processes(
    probes: Probes, drain_s: float, environments: Sequence[Mapping[str, str]], needs: str | None
) -> list[ProcessSpec]:
    """Return one worker for each of `environments`, and the chores."""
    grace_s = drain_s + AFTER_DRAIN_S
    return [
        *(
            ProcessSpec(f"worker-{number}", python_command("worker"), probes.worker, WORKER_RANK, grace_s, needs, env)
            for number, env in enumerate(environments, 1)
        ),
        ProcessSpec("chores", python_command("api.chores"), logged_ready, CHORES_RANK, STOP_GRACE_S, needs),
    ]
