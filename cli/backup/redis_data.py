"""The Redis data of a folder of `fusequeue up`: of the running server, or of one that is started to read them."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cli.backup.redis_connection import RedisConnection
from cli.up import environment, folder_lock, ports, redis_server
from shared.errors import ConfigurationError, RedisUnavailable
from shared.runtime.python_command import python_command

LOAD_S = 600.0
LOAD_POLL_S = 0.05
LOAD_FILE = "appendonly.aof"
"""Redis 6.2 and later load a snapshot of this name as the beginning of their append-only file."""


@contextmanager
def redis_of(data_dir: Path) -> Iterator[RedisConnection]:
    """Connect to the Redis of `data_dir`, which is started if `fusequeue up` does not run."""
    recorded = environment.recorded(data_dir)
    if not recorded:
        raise ConfigurationError(f"{data_dir} has no data; --data-dir must name the folder of a `fusequeue up`")
    if environment.REDIS_URL not in recorded:
        raise ConfigurationError(
            f"the Redis of {data_dir} is not its own, but that of FUSEQUEUE_REDIS_URL: back it up by its own means "
            "(docs/operations/redis-and-backups.md), and copy the storage after it"
        )
    try:
        lock = folder_lock.lock(data_dir / "lock", "--data-dir")
    except ConfigurationError:  # `fusequeue up` runs
        with RedisConnection(recorded[environment.REDIS_URL]) as connection:
            yield connection
        return
    with lock, running_server(data_dir / "redis") as connection:
        yield connection


@contextmanager
def running_server(folder: Path) -> Iterator[RedisConnection]:
    """Run a redis-server on its data `folder`, and connect to it once it has loaded them."""
    server, password = redis_server.find(), secrets.token_urlsafe(24)
    with ports.reserved_port(redis_server.HOST, redis_server.FIRST_PORT, "stop what uses them") as port:
        command = redis_server.configure(server, folder, port, password)
        # It writes its data on SIGTERM, also when this process is killed.
        watch = python_command("shared.runtime.parent_process", str(os.getpid()), str(int(signal.SIGTERM)))
        log = folder / "redis.log"
        with log.open("wb") as output:
            process = subprocess.Popen((*watch, *command), stdout=output, stderr=output, start_new_session=True)
        try:
            with _connected(process, f"redis://:{password}@{redis_server.HOST}:{port}/0", log) as connection:
                yield connection
        finally:
            process.terminate()
            process.wait()
    log.unlink()


def _connected(process: subprocess.Popen[bytes], url: str, log: Path) -> RedisConnection:
    give_up_s = time.monotonic() + LOAD_S
    while process.poll() is None and time.monotonic() < give_up_s:
        try:
            with RedisConnection(url) as connection:
                connection.key_count()  # an error while data are loaded
            return RedisConnection(url)
        except RedisUnavailable:
            time.sleep(LOAD_POLL_S)
    last = log.read_text("utf-8", "replace").strip().rpartition("\n")[2]
    raise RedisUnavailable(f"Redis did not load its data: {last}")
