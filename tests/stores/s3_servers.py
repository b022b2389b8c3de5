"""S3 servers, each with the credentials `test` and `test`, on a private port."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import httpx
from harness.ports import free_port

from stores.packages import FOLDER, weed

START_TIMEOUT_S = 60.0
MAKES_BUCKETS = "a write with a key of the action Admin makes a bucket that is missing"
IDENTITY = {
    "name": "root",
    "credentials": [{"accessKey": "test", "secretKey": "test"}],
    "actions": ["Admin", "Read", "Write", "List", "Tagging"],
}
S3RVER = """
const account = require("s3rver/lib/models/account").DUMMY_ACCOUNT;
account.createKeyPair("test", "test");
const S3rver = require("s3rver");
new S3rver({address: "127.0.0.1", port: Number(process.argv[1]), directory: process.argv[2], silent: true}).run();
"""


@dataclass(frozen=True)
class S3Server:
    """A server: its command for a port and a folder, its version, and the tests that ask for more than it offers."""

    name: str
    command: Callable[[int, Path], Sequence[str]]
    version: Callable[[], str]
    differs: Mapping[str, str] = field(default_factory=dict)
    """Tests that cannot pass, each with what the server does instead."""


def _moto(port: int, _folder: Path) -> Sequence[str]:
    return (sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port))


def _seaweedfs(port: int, folder: Path) -> Sequence[str]:
    config = folder / "s3.json"
    config.write_text(json.dumps({"identities": [IDENTITY]}), "utf-8")
    ports = {name: free_port() for name in ("master.port", "volume.port", "filer.port")}
    grpc = {f"{name}.grpc": free_port() for name in ("master.port", "volume.port", "filer.port", "s3.port")}
    options = {
        "ip": "127.0.0.1",
        "dir": folder,
        "master.volumeSizeLimitMB": 64,
        "volume.max": 50,
        "s3.port": port,
        "s3.config": config,
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        **ports,
        **grpc,
    }
    server = (str(weed()), "-logtostderr=true", "server", "-filer", "-s3")
    return (*server, *(f"-{name}={value}" for name, value in options.items()))


def _s3rver(port: int, folder: Path) -> Sequence[str]:
    return ("node", "--openssl-legacy-provider", "-e", S3RVER, str(port), str(folder))


def _weed_version() -> str:
    shown = subprocess.run((str(weed()), "version"), capture_output=True, text=True, timeout=30, check=True).stdout
    found = re.search(r"\d+\.\d\d\b", shown)
    return found[0] if found else shown.strip()


def _s3rver_version() -> str:
    manifest = FOLDER / "s3rver" / "node_modules" / "s3rver" / "package.json"
    return str(json.loads(manifest.read_text("utf-8"))["version"])


SERVERS = (
    S3Server("moto", _moto, lambda: metadata.version("moto")),
    S3Server(
        "SeaweedFS",
        _seaweedfs,
        _weed_version,
        {
            "test_missing_bucket_is_reported_by_every_call": MAKES_BUCKETS,
            "test_a_bucket_that_cannot_be_used_fails_the_job": MAKES_BUCKETS,
        },
    ),
    S3Server(
        "s3rver",
        _s3rver,
        _s3rver_version,
        {
            "test_a_versioned_bucket_keeps_one_probe_of_all_checks": "has no versions of objects",
            "test_reads_are_atomic_under_concurrent_writes": "returns an object empty while it is written",
        },
    ),
)


@contextlib.contextmanager
def running(server: S3Server, folder: Path) -> Iterator[str]:
    """Run a server with its objects in `folder`; yields its URL."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    (folder / "objects").mkdir()
    command = server.command(port, folder / "objects")
    modules = FOLDER / server.name
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=modules if modules.is_dir() else folder)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _responds(url):
            if time.monotonic() > deadline or process.poll() is not None:
                raise RuntimeError(f"{server.name} does not start: {(folder / 'log').read_text()[-2000:]}")
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(START_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _responds(url: str) -> bool:
    try:
        return httpx.get(url, timeout=10).status_code < 500
    except httpx.TransportError:
        return False
