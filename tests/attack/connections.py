"""Attacks on the server's connections, which need no key or a key that does not exist."""

from __future__ import annotations

import asyncio
import contextlib
import secrets

from attack.attacks import Attack, Target, repeat
from shared.auth import new_token

IDLE, SLOW, CHUNKED, PIPELINED = 2_000, 300, 8, 8
PATH = "/v1/jobs"
PIECE = 2_000  # one-byte chunks written at once


async def idle_connections(target: Target) -> None:
    """Connections that send nothing, and again as soon as they are closed."""

    async def one() -> None:
        with contextlib.suppress(OSError):
            reader, writer = await target.connect()
            await reader.read(1)
            writer.close()
        await asyncio.sleep(0.2)

    await repeat(IDLE, one)


async def slow_bodies(target: Target) -> None:
    """Requests with an announced body that arrives one byte in a few seconds."""

    async def one() -> None:
        head = (
            f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n"
        )
        await _trickle(target, f"{head}Authorization: Bearer {target.key}\r\n\r\n".encode())

    await repeat(SLOW, one)


async def slow_heads(target: Target) -> None:
    """Requests with a head that never ends."""

    async def one() -> None:
        await _trickle(target, f"GET {PATH} HTTP/1.1\r\nHost: localhost\r\nX-".encode())

    await repeat(SLOW, one)


async def _trickle(target: Target, first: bytes) -> None:
    with contextlib.suppress(OSError):
        _, writer = await target.connect()
        writer.write(first)
        while not writer.is_closing():
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(3)
    await asyncio.sleep(0.2)


async def one_byte_chunks(target: Target) -> None:
    """Bodies without end in chunks of one byte, without a key."""

    async def one() -> None:
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        with contextlib.suppress(OSError):
            _, writer = await target.connect()
            writer.write(head.encode())
            while not writer.is_closing():
                writer.write(b"1\r\nx\r\n" * PIECE)
                await writer.drain()

    await repeat(CHUNKED, one)


async def pipelined_requests(target: Target) -> None:
    """Many requests in one write, with responses that are never read."""

    async def one() -> None:
        with contextlib.suppress(OSError):
            _, writer = await target.connect()
            while not writer.is_closing():
                writer.write(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)
                async with asyncio.timeout(10):
                    await writer.drain()
            writer.close()

    await repeat(PIPELINED, lambda: _within(one()))


async def _within(work: object) -> None:
    with contextlib.suppress(TimeoutError):
        await work  # type: ignore[misc]


async def invalid_keys(target: Target) -> None:
    """Keys with a valid checksum that do not exist, each of them new."""
    async with target.client() as client:

        async def one() -> None:
            headers = {"Authorization": f"Bearer {new_token()}"}
            await target.send(client, "GET", f"{PATH}/job_{secrets.token_hex(13)}", headers=headers)

        await repeat(16, one)


ATTACKS: dict[str, Attack] = {
    "idle connections": idle_connections,
    "slow heads": slow_heads,
    "slow bodies": slow_bodies,
    "one-byte chunks": one_byte_chunks,
    "pipelined requests": pipelined_requests,
    "invalid keys": invalid_keys,
}
