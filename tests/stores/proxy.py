"""nginx before an API process: requests after idle gaps, with and without a path prefix."""

from __future__ import annotations

import contextlib
import random
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
from harness.api_process import Server
from harness.ports import free_port
from harness.waiting import wait_until

CLIENTS = 20
GAPS_S = (15.0, 60.0, 65.0, 70.0)
"""Long ones: as long as nginx keeps an idle connection to the API, and shorter and longer ones."""

SHORT_GAPS = 45
PREFIX = "/gen"
CONFIG = """
daemon off;
pid {folder}/pid;
error_log {folder}/error.log warn;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    upstream up {{ server 127.0.0.1:{api}; keepalive 32; }}
    server {{
        listen 127.0.0.1:{port};
        proxy_http_version 1.1;
        proxy_set_header Connection "";
        proxy_set_header Host $http_host;
        proxy_set_header X-Forwarded-For $remote_addr;
        proxy_set_header X-Forwarded-Proto $scheme;
        location / {{ proxy_pass http://up; }}
        location {prefix}/ {{
            proxy_pass http://up/;
            proxy_set_header Connection "";
            proxy_set_header Host $http_host;
            proxy_set_header X-Forwarded-For $remote_addr;
            proxy_set_header X-Forwarded-Proto $scheme;
            proxy_set_header X-Forwarded-Prefix {prefix};
        }}
    }}
}}
"""


@dataclass(frozen=True)
class ProxyOutcome:
    """The statuses of the responses, and how many of them had URLs of another host or path."""

    version: str
    statuses: Counter[int]
    other_urls: int
    longest_gap_s: float

    @property
    def right(self) -> bool:
        return set(self.statuses) == {202} and self.other_urls == 0


def executable() -> str | None:
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")


def run(nginx: str, redis_server: Path, folder: Path) -> ProxyOutcome:
    """Send requests from all clients at the same times, so that all connections to the API are idle in each gap."""
    shown = subprocess.run((nginx, "-v"), capture_output=True, text=True, timeout=30, check=True).stderr
    rng = random.Random(7)
    gaps = [*GAPS_S, *(rng.uniform(1.0, 2.0) for _ in range(SHORT_GAPS))]
    rng.shuffle(gaps)
    with (
        _redis(redis_server, folder) as redis_url,
        _api(redis_url, folder) as api,
        _nginx(nginx, api, folder) as url,
        ThreadPoolExecutor(CLIENTS) as clients,
    ):
        rows = list(clients.map(lambda number: _client(url, number, gaps), range(CLIENTS)))
    responses = [row for some in rows for row in some]
    statuses = Counter(status for status, _ in responses)
    other = sum(status == 202 and not right for status, right in responses)
    return ProxyOutcome(shown.strip().rpartition("/")[2], statuses, other, max(gaps))


def _client(url: str, number: int, gaps: list[float]) -> list[tuple[int, bool]]:
    """Return the status of each response, and whether its URLs are those that the client used."""
    rng, found = random.Random(number), []
    base = url + PREFIX if number % 2 else url
    body = {"model": "demo", "prompt": f"client {number}"}
    for gap in (0.0, *gaps):
        time.sleep(gap + rng.uniform(-0.1, 0.1) if gap else 0.0)
        response = httpx.post(f"{base}/v1/jobs", json=body, timeout=30)
        urls = response.json()["urls"].values() if response.status_code == 202 else ()
        found.append((response.status_code, bool(urls) and all(one.startswith(f"{base}/v1/") for one in urls)))
    return found


@contextlib.contextmanager
def _redis(executable: Path, folder: Path) -> Iterator[str]:
    port = free_port()
    command = (str(executable), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", "")
    with _process(command, folder / "redis.log"):
        yield f"redis://127.0.0.1:{port}/0"


@contextlib.contextmanager
def _api(redis_url: str, folder: Path) -> Iterator[int]:
    server = Server(redis_url, folder, trusted_proxies="127.0.0.1", auth="insecure-no-keys")
    try:
        wait_until(lambda: server.responds("/readyz"), "the API is ready")
        yield server.port
    finally:
        server.stop()


@contextlib.contextmanager
def _nginx(nginx: str, api: int, folder: Path) -> Iterator[str]:
    port, config = free_port(), folder / "nginx.conf"
    config.write_text(CONFIG.format(folder=folder, api=api, port=port, prefix=PREFIX), "utf-8")
    command = (nginx, "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(config))
    with _process(command, folder / "nginx.log") as process:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: process.poll() is not None or _responds(f"{url}/healthz"), "nginx is ready")
        if process.poll() is not None:
            raise RuntimeError(f"nginx has ended: {(folder / 'error.log').read_text('utf-8')[-2000:]}")
        yield url


def _responds(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.TransportError:
        return False


@contextlib.contextmanager
def _process(command: tuple[str, ...], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)
