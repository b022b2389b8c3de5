"""A compose project of its own, with the committed files, in a folder that is removed at the end."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NAME = "fusequeue-tried"
SERVICES = ("api", "chores", "worker-cpu", "prometheus")
COMMAND_S, BUILD_S = 120.0, 1800.0
"""Most seconds of a command, and of a build."""

Done = subprocess.CompletedProcess[str]


class Project:
    """Runs `docker compose` for the files in `folder`; `docker` is the engine's command."""

    def __init__(self, docker: Sequence[str], folder: Path, more_files: Sequence[str]) -> None:
        self.folder = folder
        self._docker = list(docker)
        files = [str(folder / "source/compose/compose.yaml"), *more_files]
        self._compose = ["compose", "-p", NAME, "--env-file", str(folder / "env"), "--profile", "cpu"]
        self._compose += [option for file in files for option in ("-f", file)]

    def docker(self, *arguments: str, timeout_s: float = COMMAND_S, check: bool = True) -> Done:
        done = subprocess.run(
            [*self._docker, *arguments], capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL
        )
        if check and done.returncode:
            raise RuntimeError(f"docker {shlex.join(arguments)}: {done.stdout[-2000:]}{done.stderr[-4000:]}")
        return done

    def compose(self, *arguments: str, timeout_s: float = COMMAND_S, check: bool = True) -> Done:
        return self.docker(*self._compose, *arguments, timeout_s=timeout_s, check=check)

    def client(self, key: str, *arguments: str) -> list[str]:
        """Return the command of a container that runs a client; it belongs to no service, and outlives them."""
        url, key = "FUSEQUEUE_URL=http://api:8000", f"FUSEQUEUE_API_KEY={key}"
        run = ("run", "--rm", "-i", "--network", f"{NAME}_default", "-e", url, "-e", key, "fusequeue-api")
        return [*self._docker, *run, *arguments]

    def containers(self) -> dict[str, dict[str, Any]]:
        """Return what `docker inspect` says of each service's container."""
        ids = self.compose("ps", "-aq").stdout.split()
        facts = json.loads(self.docker("inspect", *ids).stdout) if ids else []
        return {one["Config"]["Labels"]["com.docker.compose.service"]: one for one in facts}

    def healthy_workers(self) -> int:
        """Return how many workers pass their health check."""
        service = "label=com.docker.compose.service=worker-cpu"
        return len(self.docker("ps", "-q", "--filter", service, "--filter", "health=healthy").stdout.split())

    def healthy(self) -> bool:
        """Say whether all services run, and those with a health check pass it."""
        states = {name: one["State"] for name, one in self.containers().items()}
        return all(
            states.get(name, {}).get("Running") and states[name].get("Health", {}).get("Status", "healthy") == "healthy"
            for name in SERVICES
        )


@contextmanager
def project(docker: Sequence[str], more_files: Sequence[str]) -> Iterator[Project]:
    """Yield a project; its containers, volumes and folder are removed at the end."""
    with tempfile.TemporaryDirectory(prefix="fusequeue-containers-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # Prometheus reads its key as another user
        (folder / "source").mkdir()
        archive = subprocess.run(
            ["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True, timeout=COMMAND_S
        )
        subprocess.run(["tar", "-x", "-C", str(folder / "source")], input=archive.stdout, check=True, timeout=COMMAND_S)
        key = folder / "metrics.key"
        values = {"S3_SECRET": secrets.token_hex(16), "GRAFANA_PASSWORD": "unused", "METRICS_KEY_FILE": str(key)}
        (folder / "env").write_text("".join(f"{name}={value}\n" for name, value in values.items()))
        made = Project(docker, folder, more_files)
        try:
            yield made
        finally:
            made.compose("down", "-v", "--remove-orphans", "-t", "5", check=False)


def until(condition: Any, what: str, timeout_s: float = COMMAND_S) -> float:
    """Wait until `condition()` is true; return the seconds."""
    started = time.monotonic()
    while not condition():
        if time.monotonic() - started > timeout_s:
            raise RuntimeError(f"timeout of {timeout_s:.0f} s waiting until {what}")
        time.sleep(0.5)
    return time.monotonic() - started


def engine_command() -> list[str]:
    """Return the command of the container engine: `docker`, or what DOCKER says."""
    return shlex.split(os.environ.get("DOCKER", "docker"))
