"""The service as a user starts it, on private ports, with keys; and the variables of a script that uses it."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.ports import free_port

from clients import tls_front

ROOT = Path(__file__).resolve().parents[2]
READY_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0
FUSEQUEUE = (sys.executable, "-m", "cli.main")
MODELS = """
[[model]]
id = "demo"
source = "{root}/demo/model"
tasks = ["text_to_image", "image_to_image", "inpaint"]
max_batch = 16
schedulers = ["DDIMScheduler", "EulerDiscreteScheduler"]
[model.defaults]
width = 64
height = 64
steps = 12
guidance_scale = 2.0
[model.limits]
min_side = 64
max_side = 128
max_images = 8

[[model]]
id = "film"
source = "{folder}/film"
tasks = ["text_to_video", "image_to_video"]
max_batch = 4
[model.defaults]
width = 64
height = 64
steps = 2
frames = 5
fps = 8
[model.limits]
multiple_of = 32
max_frames = 17
frames_multiple = 4
max_images = 4
"""


@dataclass(frozen=True)
class Service:
    """A running service, which `https_url` reaches too; `port` is one on which a script can receive webhooks."""

    url: str
    https_url: str
    certificate: Path
    key: str
    port: int

    def variables(self) -> dict[str, str]:
        """Return the environment variables of a script."""
        return {
            "FUSEQUEUE_URL": self.url,
            "FUSEQUEUE_HTTPS_URL": self.https_url,
            "SSL_CERT_FILE": str(self.certificate),
            "NODE_EXTRA_CA_CERTS": str(self.certificate),
            "FUSEQUEUE_API_KEY": self.key,
            "WEBHOOK_PORT": str(self.port),
            "FUSEQUEUE_COMMAND": shlex.join(FUSEQUEUE),
            "FUSEQUEUE_FOLDER": str(ROOT),
        }


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Service]:
    """Run `fusequeue up` with the demo model and a tiny video model, its files in `folder`."""
    _save_models(folder)
    receiver = free_port()
    command = [*FUSEQUEUE, "up", "--port", str(free_port()), "--data-dir", str(folder / "data")]
    with (folder / "up.log").open("wb") as log, (folder / "ready").open("wb") as ready:
        process = subprocess.Popen(command, cwd=ROOT, env=_environment(folder, receiver), stdout=ready, stderr=log)
    try:
        url = _ready(process, folder)
        create = [*FUSEQUEUE, "keys", "create", "--quiet", "--data-dir", str(folder / "data")]
        created = subprocess.run(
            create,
            cwd=ROOT,
            env=_environment(folder, receiver),
            capture_output=True,
            timeout=READY_TIMEOUT_S,
            check=True,
        )
        with tls_front.serving(url, folder) as (https_url, certificate):
            yield Service(url, https_url, certificate, created.stdout.decode().strip(), receiver)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _save_models(folder: Path) -> None:
    # In a process of its own: torch and diffusers print warnings at import.
    code = "import sys, pathlib; from tiny import registry; registry.save_tiny(sys.argv[1], pathlib.Path(sys.argv[2]))"
    command = [sys.executable, "-c", code, "wan-2.2-ti2v", str(folder / "film")]
    subprocess.run(command, cwd=ROOT, capture_output=True, timeout=READY_TIMEOUT_S, check=True)
    (folder / "models.toml").write_text(MODELS.format(root=ROOT, folder=folder), "utf-8")


def _environment(folder: Path, receiver: int) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("FUSEQUEUE_")}
    return inherited | {
        "FUSEQUEUE_AUTH": "keys",
        "FUSEQUEUE_MODELS": str(folder / "models.toml"),
        "FUSEQUEUE_DEVICE": "cpu",
        "FUSEQUEUE_TRUSTED_PROXIES": "127.0.0.1",
        "FUSEQUEUE_WEBHOOK_ALLOW_NETWORKS": "127.0.0.0/8",
        "FUSEQUEUE_WEBHOOK_ALLOW_HTTP": "1",
        "FUSEQUEUE_WEBHOOK_PORTS": str(receiver),
    }


def _ready(process: subprocess.Popen[bytes], folder: Path) -> str:
    """Wait for the ready line and return the URL."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        line = (folder / "ready").read_text()
        if line.endswith("\n"):
            return line.removeprefix("ready ").strip()
        time.sleep(0.1)
    raise RuntimeError(f"fusequeue up is not ready:\n{(folder / 'up.log').read_text(errors='replace')[-4000:]}")
