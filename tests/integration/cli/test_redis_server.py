"""The embedded redis-server, as `up` configures it: each server there is."""

import asyncio
import os
from pathlib import Path

import pytest
from harness.ports import free_port
from redis.asyncio import Redis

from cli.up.command import redis_server
from cli.up.process import BoundedLog, Process
from cli.up.redis_server import RedisServer


def servers() -> list[RedisServer]:
    """Return the one that `up` would take, and the wheel's."""
    carried = redis_server._carried()
    version = redis_server._version(carried) if carried else None
    found = {redis_server.find()}
    if carried and version:
        found.add(RedisServer(carried, version))
    return sorted(found, key=str)


async def start(command: tuple[str, ...], port: int, folder: Path) -> Process:
    process = await Process.start(command, env=dict(os.environ), log=BoundedLog(folder / "redis.log"))
    async with asyncio.timeout(60):
        while not await redis_server.answers(port, "secret"):
            await asyncio.sleep(0.02)
    return process


@pytest.mark.parametrize("server", servers(), ids=str)
async def test_it_keeps_what_it_acknowledged_and_lets_nobody_else_in(server, tmp_path):
    """It answers to its password alone, never evicts, and has its data after a kill and after a proper end."""
    port = free_port()
    command = redis_server.configure(server, tmp_path / "data", port, "secret")
    for ending in ("kill", "terminate"):
        process = await start(command, port, tmp_path)
        assert not await redis_server.answers(port, "guessed")
        async with Redis(port=port, password="secret") as client:
            await client.set(ending, "kept")
            assert (await client.config_get("maxmemory-policy"))["maxmemory-policy"] == "noeviction"
        getattr(process, ending)()
        await process.wait()
        process.log.close()
        assert not await redis_server.answers(port, "secret")
    process = await start(command, port, tmp_path)
    async with Redis(port=port, password="secret", decode_responses=True) as client:
        assert await client.mget("kill", "terminate") == ["kept", "kept"]
    process.terminate()
    assert await process.wait() == 0
    process.log.close()
