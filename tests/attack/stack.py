"""A stack of real processes with keys of two tenants, and the memory that its processes use."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from chaos.processes import ROOT, Cluster, die_with_parent

from shared.auth import Scope
from shared.queue import Queue

MANIFESTS = ROOT / "compose/kubernetes/base"
SERVED = ("api", "chores")
READY_TIMEOUT_S = 60.0
SAMPLE_S = 0.2
POLL_S = 0.1
MIB = 1024 * 1024
_MODELS = """[[model]]
id = "alpha"
source = "not-loaded/alpha"
tasks = ["text_to_image", "image_to_image", "inpaint", "edit"]
max_batch = 8
window_ms = 20
[model.defaults]
width = 16
height = 16
steps = 2
[model.limits]
min_side = 16
max_side = 128
max_images = 4
max_input_images = 4
"""


@dataclass(frozen=True)
class Keys:
    """The keys of one tenant, by what they can do."""

    tenant: str
    both: str
    read: str
    write: str

    @property
    def headers(self) -> dict[str, str]:
        return authorization(self.both)


def authorization(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def memory_limit(role: str) -> int:
    """Return the memory limit of a process in the Kubernetes manifests, in bytes."""
    documents = yaml.safe_load_all((MANIFESTS / f"{role}.yaml").read_text("utf-8"))
    deployment = next(one for one in documents if one["kind"] == "Deployment")
    text = deployment["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"]
    return int(text.removesuffix("Gi").removesuffix("Mi")) * {"Gi": 1024, "Mi": 1}[text[-2:]] * MIB


class Memory:
    """The most memory that each process has used together with its children since `reset`, in bytes."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}

    async def watch(self, processes: Mapping[str, subprocess.Popen[bytes]]) -> None:
        while True:
            for role, process in processes.items():
                self.peaks[role] = max(self.peaks.get(role, 0), used(process.pid))
            await asyncio.sleep(SAMPLE_S)

    def reset(self, processes: Mapping[str, subprocess.Popen[bytes]]) -> None:
        for process in processes.values():
            with contextlib.suppress(OSError):
                Path(f"/proc/{process.pid}/clear_refs").write_text("5")
        self.peaks.clear()

    def excesses(self) -> list[str]:
        """Return a line for each process that used more than its limit."""
        return [
            f"{role} used {peak // MIB} MiB of {memory_limit(role) // MIB} MiB"
            for role, peak in self.peaks.items()
            if peak > memory_limit(role)
        ]


def used(pid: int) -> int:
    """Return the peak of a process or, if it has children, what they use together; shared pages count once."""
    with contextlib.suppress(psutil.Error, OSError):
        process = psutil.Process(pid)
        children = process.children(recursive=True)
        peak = int(Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
        if children:
            return max(peak, sum(_proportional(one) for one in (process, *children)))
        return peak
    return 0


def _proportional(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):
        return int(process.memory_full_info().pss)
    return 0


class Stack:
    """redis-server, an API that requires keys, chores, and workers with an engine that sleeps: `async with Stack(...)`.

    API and chores are started as a deployment starts them, so that their memory is theirs.
    """

    def __init__(
        self,
        folder: Path,
        *,
        step_s: float = 0.01,
        prefix: Sequence[str] = (),
        files: int | None = None,
        **settings: object,
    ) -> None:
        """`prefix` is a command that starts the API and the chores; `files` is how many the API can open."""
        defaults: dict[str, object] = {"auth": "keys", "lease_ms": 10_000, "namespace": "attack"}
        self.cluster = Cluster(folder, step_s=step_s, **{**defaults, **settings})
        (folder / "models.toml").write_text(_MODELS, "utf-8")
        self.folder, self._prefix, self._files = folder, tuple(prefix), files
        self.url = f"http://127.0.0.1:{self.cluster.api_port}"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.memory = Memory()
        self.keys: dict[str, Keys] = {}
        self.admin = ""
        self._watching: asyncio.Task[None] | None = None

    async def start(self, *tenants: str, workers: int = 1) -> None:
        """Start every process and create the keys of `tenants`."""
        self.cluster.redis.start()
        await self.cluster.redis.started()
        async with self.queue() as queue:
            for tenant in tenants:
                self.keys[tenant] = await _keys(queue, tenant)
            self.admin, _ = await queue.api_keys.create("operator", frozenset((Scope.ADMIN,)))
        for role in SERVED:
            self.start_process(role)
        for _ in range(workers):
            self.cluster.process("worker")
        await self._until_ready()
        self._watching = asyncio.create_task(self.memory.watch(self.processes))

    def start_process(self, role: str) -> None:
        """Start the API or the chores as a deployment does."""
        limit = {"api": self._files}.get(role)

        def prepare() -> None:
            die_with_parent()
            if limit is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))

        command = {"api": ["-m", "api", "--port", str(self.cluster.api_port)], "chores": ["-m", "api.chores"]}[role]
        with (self.folder / f"{role}.log").open("ab") as log:
            self.processes[role] = subprocess.Popen(
                [*self._prefix, sys.executable, *command],
                cwd=ROOT,
                env=self.cluster.env(role),
                stdout=log,
                stderr=log,
                preexec_fn=prepare,
            )

    @contextlib.asynccontextmanager
    async def queue(self) -> AsyncIterator[Queue]:
        queue = Queue.connect(self.cluster.settings())
        try:
            yield queue
        finally:
            await queue.close()

    def ended(self) -> list[str]:
        """Return a line for each process that has ended by itself."""
        lines = [f"{role} exited with {one.poll()}" for role, one in self.processes.items() if one.poll() is not None]
        return lines + [f"{one.role} exited with {one.status}" for one in self.cluster.processes if one.status]

    async def _until_ready(self) -> None:
        """Wait until every worker is ready; raises `TimeoutError`, or `RuntimeError` for a process that has ended."""
        wanted, headers = len(self.cluster.processes), authorization(self.admin)
        async with asyncio.timeout(READY_TIMEOUT_S), httpx.AsyncClient(base_url=self.url, trust_env=False) as client:
            while True:
                if ended := self.ended():
                    raise RuntimeError(f"{'; '.join(ended)}; see {self.folder}")
                with contextlib.suppress(httpx.HTTPError):
                    workers = (await client.get("/v1/workers", headers=headers)).raise_for_status().json()["data"]
                    if sum(one["state"] == "ready" for one in workers) == wanted:
                        return
                await asyncio.sleep(POLL_S)

    async def close(self) -> None:
        """End every process, by its pid."""
        if self._watching is not None:
            self._watching.cancel()
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 5
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, max(0.1, deadline - time.monotonic()))
            process.kill()
            process.wait()
        self.cluster.close()


async def _keys(queue: Queue, tenant: str) -> Keys:
    scopes = ((Scope.JOBS_READ, Scope.JOBS_WRITE), (Scope.JOBS_READ,), (Scope.JOBS_WRITE,))
    tokens = [(await queue.api_keys.create(tenant, frozenset(some)))[0] for some in scopes]
    return Keys(tenant, *tokens)


@contextlib.asynccontextmanager
async def running(folder: Path, *tenants: str, workers: int = 1, **options: Any) -> AsyncIterator[Stack]:
    """Run a stack with keys of `tenants`, its files in `folder`; `options` are those of `Stack`."""
    stack = Stack(folder, **options)
    try:
        await stack.start(*tenants, workers=workers)
        yield stack
    finally:
        await stack.close()
