"""The servers: which ones there are, how each is installed, and how it is started and ended."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil

from bench.common import record
from bench.common.service import launched, served
from bench.peers.peer_loads import ImageClient, requests
from bench.peers.servers.batch_call import HOST
from cli.up.ports import reserved_port

ENVIRONMENTS = record.ROOT / ".peers"
REQUIREMENTS = Path(__file__).parent / "requirements"
SERVERS = "bench.peers.servers"
INSTALL_TIMEOUT_S = 900.0
FIRST_PORT = 8300
READY_TIMEOUT_S, READY_GAP_S = 120.0, 0.2
END_TIMEOUT_S = 10.0
FUSEQUEUE = "fusequeue"


@dataclass(frozen=True)
class Peer:
    """A server to compare with.

    `arguments` are those of its Python, `wait_ms` is its wait window, and `list_field` holds the requests in a body.
    """

    name: str
    arguments: tuple[str, ...]
    wait_ms: int = 0
    list_field: str | None = None

    @property
    def requirements(self) -> Path | None:
        """File of its packages; None: they are among the project's own."""
        path = REQUIREMENTS / f"{self.name}.txt"
        return path if path.exists() else None

    @property
    def python(self) -> str:
        return str(ENVIRONMENTS / self.name / "bin/python") if self.requirements else sys.executable

    @property
    def installed(self) -> bool:
        """Whether its environment has the packages that its file names now."""
        mark = ENVIRONMENTS / self.name / "installed"
        return not self.requirements or (mark.exists() and mark.read_text("utf-8") == self.requirements.read_text())


# Wait windows: chosen by single turns of `closed-1`, `closed-8` and `poisson-0.6` with 2 to 10 ms, and 20 for Ray. A
# longer one makes one client wait; a shorter one divides the requests that eight clients send after a batch.
PEERS = {
    peer.name: peer
    for peer in (
        Peer("litserve", ("-m", f"{SERVERS}.litserve_server"), wait_ms=3),
        Peer("mosec", ("-m", f"{SERVERS}.mosec_server"), wait_ms=2),
        Peer("ray", ("-m", f"{SERVERS}.ray_server"), wait_ms=10),
        Peer(
            "bentoml",
            ("-m", "bentoml", "serve", f"{SERVERS}.bentoml_server:Images", "--host", HOST, "--port", "{port}"),
            list_field="requests",
        ),
        Peer("rq", ("-m", f"{SERVERS}.rq_server")),
    )
}


def install(peer: Peer) -> None:
    """Make the environment of a peer, in which this project's packages are visible too; raises `RuntimeError`."""
    if peer.installed or peer.requirements is None:
        return
    folder = ENVIRONMENTS / peer.name
    print(f"installing {peer.name} into {folder} ...", flush=True)
    venv.create(folder, clear=True, with_pip=False)  # this project's pip is visible too
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    packages.joinpath("project.pth").write_text(sysconfig.get_path("purelib") + "\n", "utf-8")
    command = [peer.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["-r", str(peer.requirements)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"{peer.name} was not installed: {(done.stderr or done.stdout)[-2000:]}")
    (folder / "installed").write_text(peer.requirements.read_text("utf-8"), "utf-8")


@contextmanager
def started(name: str, model: Path, folder: Path, requests_at_once: int) -> Iterator[ImageClient]:
    """Run a server with its files in `folder` until the block ends, and yield its client."""
    folder.mkdir(parents=True)
    if name == FUSEQUEUE:
        with served(model, folder) as url:
            yield ImageClient(url)
        return
    peer = PEERS[name]
    with reserved_port(HOST, FIRST_PORT) as port:
        fields = {"model": model, "port": port, "requests": requests_at_once, "wait_ms": peer.wait_ms}
        command = [peer.python, *(argument.format(port=port) for argument in peer.arguments)]
        environment = {f"peer_{field}": str(value) for field, value in fields.items()}
        with launched(command, folder / f"{name}.log", None, **environment) as process, ended_with(process.pid):
            client = ImageClient(f"http://{HOST}:{port}", peer.list_field)
            asyncio.run(until_ready(name, client, process))
            yield client


async def until_ready(name: str, client: ImageClient, process: subprocess.Popen[bytes]) -> None:
    """Wait until a server responds with an image; raises `RuntimeError`."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    reason: Exception | None = None
    async with client.connect() as http:
        while time.monotonic() < deadline and process.poll() is None:
            try:
                await client.image(http, next(requests(0, mixed=False)))
                return
            except (aiohttp.ClientError, RuntimeError) as error:
                reason = error
            await asyncio.sleep(READY_GAP_S)
    state = "ended" if process.poll() is not None else f"did not respond in {READY_TIMEOUT_S:.0f} s"
    raise RuntimeError(f"{name} {state} while it started: {reason}; its messages are above")


@contextmanager
def ended_with(pid: int) -> Iterator[None]:
    """Terminate a process at the end, and kill what it has started and leaves behind."""
    process = psutil.Process(pid)
    try:
        yield
    finally:
        with suppress(psutil.NoSuchProcess):
            descendants = process.children(recursive=True)
            process.terminate()
            _, left = psutil.wait_procs([process, *descendants], END_TIMEOUT_S)
            for one in left:
                with suppress(psutil.NoSuchProcess):
                    one.kill()
            psutil.wait_procs(left, END_TIMEOUT_S)
