"""`fusequeue up`: every part of fusequeue on this machine, with nothing installed beforehand."""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from cli.up import ports, redis_server
from cli.up.readiness import Probes
from cli.up.supervisor import Part, StartFailed, Supervisor
from shared.config import models_file
from shared.config.settings import Settings
from shared.errors import ConfigurationError

CHECKOUT = Path(__file__).resolve().parents[2]
WORKER_RANK, CHORES_RANK, API_RANK, REDIS_RANK = range(4)
# On top of the drain itself: giving jobs back, and the interpreter's own end.
AFTER_DRAIN_S = 10.0
STOP_GRACE_S = 10.0
API_GRACE_S = 30.0  # it gives requests that are under way 20 s
GPU_DEVICES = ("/dev/nvidia0", "/dev/kfd", "/dev/dxg")


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    host: str
    port: int
    data_dir: Path
    workers: int
    models: Path | None


def tell(line: str) -> None:
    """Say how things stand, on stderr: stdout carries the ready line alone."""
    print(line, file=sys.stderr, flush=True)


async def up(options: Options, settings: Settings, environ: Mapping[str, str]) -> int:
    """Run all parts until a signal; returns the exit status. Raises `ConfigurationError` before anything starts."""
    models = chosen_models_file(options.models, environ)
    served = models_file.load(models)
    with locked(options.data_dir):
        port = ports.first_free(options.host, options.port, tell, "the API")
        url = f"http://{reachable(options.host)}:{port}"
        env = child_environment(options.data_dir, options.workers, models, settings, environ)
        parts: list[Part] = []
        if "FUSEQUEUE_REDIS_URL" not in environ:
            with writing_to(options.data_dir):
                redis, redis_url = redis_part(options.data_dir)
            parts.append(redis)
            env["FUSEQUEUE_REDIS_URL"] = redis_url
        tell(f"models: {', '.join(spec.id for spec in served)} ({models}); data and logs: {options.data_dir}")
        async with httpx.AsyncClient(base_url=url, timeout=5.0, trust_env=False) as client:
            own = [worker_environment(at, gpus(env), env) for at in range(1, options.workers + 1)]
            parts += program_parts(
                options, port, Probes(client), settings.drain_timeout_s, own, needs_redis=bool(parts)
            )
            with writing_to(options.data_dir):
                supervisor = Supervisor(parts, env=env, log_dir=options.data_dir / "logs", tell=tell)
            return await supervise(supervisor, url)


async def supervise(supervisor: Supervisor, url: str) -> int:
    """Run until SIGINT, SIGTERM or SIGHUP, telling the URL once all is ready; a second signal kills."""
    try:
        with on_stop_signal(supervisor.stop):
            await supervisor.run(lambda: print(f"ready {url}", flush=True))
    except StartFailed as error:
        tell(str(error))
        return 1
    tell("stopped")
    return 0


@contextmanager
def on_stop_signal(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` at each SIGINT, SIGTERM and, except under nohup, SIGHUP."""
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
    """Turn an error of the file system into a `ConfigurationError` that says what to do."""
    try:
        yield
    except OSError as error:
        raise ConfigurationError(
            f"{error.filename or data_dir}: {error.strerror or error}; "
            "--data-dir must name a folder that this user may write"
        ) from error


@contextmanager
def locked(data_dir: Path) -> Iterator[None]:
    """Hold `data_dir` for this process alone; raises `ConfigurationError` while another has it."""
    with writing_to(data_dir):
        data_dir.mkdir(parents=True, exist_ok=True)
        # Opened for appending: whoever comes second must not wipe the holder's process id.
        lock = (data_dir / "lock").open("a+", encoding="ascii")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip()
            raise ConfigurationError(
                f"{data_dir} is in use by process {holder}; stop that one, or name another --data-dir"
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


def chosen_models_file(named: Path | None, environ: Mapping[str, str]) -> Path:
    """Return the models file: the one named, else FUSEQUEUE_MODELS, ./models.toml, and the one of the demo model."""
    if named is not None:
        return named.resolve()
    if "FUSEQUEUE_MODELS" in environ:
        return Path(environ["FUSEQUEUE_MODELS"]).resolve()
    here = Path("models.toml").resolve()
    return here if here.exists() else CHECKOUT / "models.toml"


def reachable(host: str) -> str:
    """Return `host` as a client on this machine writes it in a URL."""
    if host in ("0.0.0.0", "::", ""):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def child_environment(
    data_dir: Path, workers: int, models: Path, settings: Settings, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of every part: this one, and what only `up` knows. What is set already stands."""
    env = {**environ, "FUSEQUEUE_MODELS": str(models), "PYTHONUNBUFFERED": "1"}
    if settings.s3_bucket is None:
        folder = settings.storage_dir if "FUSEQUEUE_STORAGE_DIR" in environ else data_dir / "storage"
        env["FUSEQUEUE_STORAGE_DIR"] = str(folder.resolve())
    if settings.torch_threads is None and not any(Path(device).exists() for device in GPU_DEVICES):
        env["FUSEQUEUE_TORCH_THREADS"] = str(torch_threads(_cores(), workers))
    return env


def torch_threads(cores: int, workers: int) -> int:
    """Return the CPU threads a worker's torch gets: an even share of the cores, one core left to all the rest."""
    return max(1, (cores - 1) // max(1, workers))


def gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """Return the NVIDIA GPUs that workers may use, as CUDA_VISIBLE_DEVICES names them."""
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for part in named.split(",") if (name := part.strip())]
    numbers = [path.name.removeprefix("nvidia") for path in devices.glob("nvidia[0-9]*")]
    return sorted((number for number in numbers if number.isdecimal()), key=int)


def worker_environment(number: int, gpus: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return what worker `number`, counted from 1, gets beside the rest: one of several GPUs, in turn, and a port.

    A device that was named by FUSEQUEUE_DEVICE stands. FUSEQUEUE_WORKER_PORT is that of the first worker; the others
    have those after it.
    """
    own = {}
    if len(gpus) > 1 and not environ.get("FUSEQUEUE_DEVICE"):
        own["CUDA_VISIBLE_DEVICES"] = gpus[(number - 1) % len(gpus)]
    port = environ.get("FUSEQUEUE_WORKER_PORT", "")
    if port.isdecimal():  # else the worker says what is wrong with it
        own["FUSEQUEUE_WORKER_PORT"] = str(int(port) + number - 1)
    return own


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def redis_part(data_dir: Path) -> tuple[Part, str]:
    """Return the embedded redis-server and the URL to reach it."""
    server = redis_server.find()
    port = ports.first_free(redis_server.HOST, redis_server.FIRST_PORT, lambda _: None, "redis")
    password = secrets.token_urlsafe(24)
    command = redis_server.configure(server, data_dir / "redis", port, password)
    tell(f"redis: {server} on port {port}")
    part = Part(
        name="redis",
        command=command,
        ready=lambda _: redis_server.answers(port, password),
        stop_rank=REDIS_RANK,
        stop_grace_s=STOP_GRACE_S,
        # SIGTERM makes it write out and end, which it also does for a supervisor that was killed.
        orphan_signal=signal.SIGTERM,
    )
    return part, f"redis://:{password}@{redis_server.HOST}:{port}/0"


def program_parts(
    options: Options,
    port: int,
    probes: Probes,
    drain_s: float,
    workers_env: Sequence[Mapping[str, str]],
    *,
    needs_redis: bool,
) -> list[Part]:
    """Return the API, a worker for each of `workers_env`, and the chores."""
    needs = "redis" if needs_redis else None
    python = (sys.executable, "-P", "-m")
    api = Part(
        name="api",
        command=(*python, "api", "--host", options.host, "--port", str(port)),
        ready=probes.api,
        stop_rank=API_RANK,
        stop_grace_s=API_GRACE_S,
        needs=needs,
    )
    workers = [
        Part(
            name=f"worker-{number}",
            command=(*python, "worker"),
            env=own,
            ready=probes.worker,
            stop_rank=WORKER_RANK,
            stop_grace_s=drain_s + AFTER_DRAIN_S,
            needs=needs,
        )
        for number, own in enumerate(workers_env, 1)
    ]
    chores = Part(
        name="chores",
        command=(*python, "worker.chores"),
        ready=probes.chores,
        stop_rank=CHORES_RANK,
        stop_grace_s=STOP_GRACE_S,
        needs=needs,
    )
    return [api, *workers, chores]
