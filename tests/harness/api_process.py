"""An API process for tests."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx

from harness.http_server import ROOT
from harness.ports import free_port
from shared.config.settings import Settings


class Server:
    """One `python -m api` process."""

    def __init__(self, redis_url: str, folder: Path, **settings: str) -> None:
        self.port = int(settings.pop("port", 0)) or free_port()
        files = settings.pop("open_files", "")
        self.url = f"http://127.0.0.1:{self.port}"
        overrides = {
            "redis_url": redis_url,
            "namespace": f"t{os.urandom(6).hex()}",
            "models": str(ROOT / "models.toml"),
            "storage_dir": str(folder / "storage"),
            "sse_keepalive_s": "0.2",
            **settings,
        }
        self.settings = Settings(**overrides)  # type: ignore[arg-type]
        self.log = folder / "api.log"
        env = {**os.environ, **{f"FUSEQUEUE_{name.upper()}": value for name, value in overrides.items()}}
        command = [sys.executable, "-m", "api", "--port", str(self.port)]
        if files:
            command = ["sh", "-c", f'ulimit -n {int(files)} && exec "$@"', "sh", *command]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log)

    def responds(self, path: str, status: int = 200) -> bool:
        with contextlib.suppress(httpx.TransportError, OSError):
            socket.create_connection(("127.0.0.1", self.port), timeout=10).close()  # a client takes 10 ms of CPU time
            return httpx.get(self.url + path, timeout=10).status_code == status
        return self.process.poll() is not None

    def peak_kb(self) -> int:
        """Return the peak memory of the process since `reset_peak`."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0])

    def reset_peak(self) -> int:
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")
        return self.peak_kb()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)
