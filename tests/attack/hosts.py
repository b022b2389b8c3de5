"""Attacks by hosts that answer slowly: of images, webhooks and outputs, and name servers that do not answer at all."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket

import aiohttp

from attack.attacks import Attack, Target, repeat

SLOW_HOSTS = 40
LINES = 1_000
JOB = {"model": "alpha", "prompt": "a"}
EDIT = {**JOB, "task": "edit"}
NAME_SERVER = "127.0.0.99"


async def _slow_host(target: Target) -> asyncio.Server:
    """Serve on every loopback address: a response begins at once and then comes a byte a second."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            target.counts["fetched"] += 1
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: 10000\r\n\r\n")
            while not writer.is_closing():
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(1)
        writer.close()

    return await asyncio.start_server(serve, "0.0.0.0", target.hostile_port)


def _urls(target: Target) -> itertools.cycle[str]:
    return itertools.cycle(f"http://127.0.1.{number}:{target.hostile_port}/a" for number in range(1, SLOW_HOSTS + 1))


async def slow_image_urls(target: Target) -> None:
    """Jobs with image URLs of slow hosts, submitted directly."""
    urls = _urls(target)
    async with await _slow_host(target), target.client() as client:

        async def one() -> None:
            await target.send(client, "POST", "/v1/jobs", json={**EDIT, "image": next(urls)})

        await repeat(64, one)


async def slow_urls_in_batches(target: Target) -> None:
    """Batches of lines with image URLs of slow hosts."""
    urls = _urls(target)
    async with await _slow_host(target), target.client() as client:
        for number in range(4):
            lines = [
                {
                    "custom_id": str(line),
                    "method": "POST",
                    "url": "/v1/jobs",
                    "body": {**EDIT, "image": f"{next(urls)}{number}-{line}"},
                }
                for line in range(LINES)
            ]
            form = aiohttp.FormData({"purpose": "batch"})
            form.add_field("file", "\n".join(map(json.dumps, lines)).encode(), filename="a.jsonl")
            file = await target.send(client, "POST", "/v1/files", data=form)
            await target.send(
                client, "POST", "/v1/batches", json={"input_file_id": file.get("id"), "endpoint": "/v1/jobs"}
            )
        await asyncio.Event().wait()


async def stalling_webhooks(target: Target) -> None:
    """Jobs with webhooks to slow hosts."""
    urls = _urls(target)
    async with await _slow_host(target), target.client() as client:

        async def one() -> None:
            lines = [{**JOB, "webhook": next(urls)} for _ in range(200)]
            data, headers = "\n".join(map(json.dumps, lines)).encode(), {"Content-Type": "application/x-ndjson"}
            await target.send(client, "POST", "/v1/jobs:bulk", data=data, headers=headers)
            await asyncio.sleep(2)

        await repeat(1, one)


async def stalling_outputs(target: Target) -> None:
    """Jobs whose outputs go to slow hosts."""
    urls = _urls(target)
    async with await _slow_host(target), target.client() as client:
        numbers = itertools.count()

        async def one() -> None:
            places = [f"{next(urls)}{next(numbers)}" for _ in range(4)]
            await target.send(client, "POST", "/v1/jobs", json={**JOB, "n": 4, "output": {"put_urls": places}})

        await repeat(16, one)


async def silent_name_servers(target: Target) -> None:
    """Image URLs and webhooks with names that no server resolves; the stack uses the name server of this attack."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind((NAME_SERVER, 53))
        numbers = itertools.count()
        async with target.client() as client:

            async def one() -> None:
                number = next(numbers)
                url = f"https://host-{number}.example.com:{target.hostile_port}/a"
                if number % 3 == 0:
                    await target.send(client, "POST", "/v1/webhooks", json={"url": url})
                elif number % 3 == 1:
                    await target.send(client, "POST", "/v1/jobs", json={**EDIT, "image": url})
                else:
                    await target.send(client, "POST", "/v1/jobs", json={**JOB, "webhook": url})

            await repeat(64, one)


ATTACKS: dict[str, Attack] = {
    "slow image URLs": slow_image_urls,
    "slow URLs in batches": slow_urls_in_batches,
    "stalling webhooks": stalling_webhooks,
    "stalling outputs": stalling_outputs,
    "silent name servers": silent_name_servers,
}
