"""Attacks with images and other uploads, with a key."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import itertools
import json
import secrets
import socket
from collections.abc import AsyncIterator

import aiohttp
from PIL import Image

from attack.attacks import ADDRESS, TIMEOUT_S, Attack, Target, repeat

AT_ONCE, HELD, DOWNLOADS = 10, 1_000, 2_000
PAUSE_S = 5.0
READ_EVERY_S = 3.0
BODY_BYTES = 20 * 1000 * 1000


def large(kind: str, width: int, height: int, **options: object) -> bytes:
    """Return an image of one color: a small file of many pixels."""
    file = io.BytesIO()
    Image.new("RGB", (width, height), (9, 99, 199)).save(file, kind, **options)
    return file.getvalue()


def with_trailer(image: bytes, number: int) -> bytes:
    """Return the image as a file that was not uploaded before."""
    return image + number.to_bytes(8, "big")


async def _images(target: Target, image: bytes) -> None:
    numbers = itertools.count()
    async with target.client() as client:

        async def one() -> None:
            form = aiohttp.FormData()
            form.add_field("file", with_trailer(image, next(numbers)), filename="a", content_type="image/png")
            await target.send(client, "POST", "/v1/inputs", data=form)

        await repeat(AT_ONCE, one)


async def large_pngs(target: Target) -> None:
    """PNGs of 39 megapixels."""
    await _images(target, large("PNG", 6_500, 6_000))


async def large_webps(target: Target) -> None:
    """WebPs of 40 megapixels."""
    await _images(target, large("WEBP", 8_000, 5_000, quality=1))


async def small_inputs(target: Target) -> None:
    """Inputs without end, each a record and an object."""
    async with target.client() as client:

        async def one() -> None:
            file = io.BytesIO()
            Image.frombytes("RGB", (16, 16), secrets.token_bytes(768)).save(file, "PNG")
            form = aiohttp.FormData()
            form.add_field("file", file.getvalue(), filename="a.png", content_type="image/png")
            await target.send(client, "POST", "/v1/inputs", data=form)

        await repeat(16, one)


async def large_bodies(target: Target) -> None:
    """Bodies of the largest size: images as base64 in JSON, which stay in memory, and files."""
    text = base64.b64encode(secrets.token_bytes(BODY_BYTES)).decode()
    async with target.client() as client:
        body = {"inputs": text, "parameters": {"prompt": "a", "task": "edit"}}
        await repeat(AT_ONCE, lambda: target.send(client, "POST", "/compat/huggingface/alpha", json=body))


async def large_images_in_batches(target: Target) -> None:
    """Batches of six lines, each with another WebP of 40 megapixels in it."""
    image, numbers = large("WEBP", 8_000, 5_000, quality=1), itertools.count()

    def line() -> dict[str, object]:
        number = next(numbers)
        url = f"data:image/webp;base64,{base64.b64encode(with_trailer(image, number)).decode()}"
        body = {"model": "alpha", "prompt": "a", "task": "edit", "image": url}
        return {"custom_id": str(number), "method": "POST", "url": "/v1/jobs", "body": body}

    async with target.client() as client:

        async def one() -> None:
            form = aiohttp.FormData({"purpose": "batch"})
            form.add_field("file", "\n".join(json.dumps(line()) for _ in range(6)).encode(), filename="a.jsonl")
            if file := await target.send(client, "POST", "/v1/files", data=form):
                body = {"input_file_id": file["id"], "endpoint": "/v1/jobs"}
                await target.send(client, "POST", "/v1/batches", json=body)
            await asyncio.sleep(0.5)

        await repeat(2, one)


async def held_lines(target: Target) -> None:
    """Bulk requests that send all of a line of the largest size but its end, and wait."""
    piece, head = b"x" * 1_000_000, {"Content-Type": "application/x-ndjson"}

    async def line() -> AsyncIterator[bytes]:
        yield piece
        target.counts["sent"] += 1
        await asyncio.sleep(TIMEOUT_S)

    async with target.client() as client:

        async def one() -> None:
            await target.send(client, "POST", "/v1/jobs:bulk", data=line(), headers=head)
            await asyncio.sleep(PAUSE_S)  # to occupy memory, not the network

        await repeat(HELD, one)


async def large_forms(target: Target) -> None:
    """Multipart bodies of one part with a header that has no end, and of many empty parts."""
    bodies = itertools.cycle(
        (
            b'--x\r\nContent-Disposition: form-data; name="' + b"a" * BODY_BYTES,
            b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n\r\n' * 300_000 + b"--x--\r\n",
            b"--x\r\n" + b"A: b\r\n" * 3_000_000,
        )
    )
    head = {"Content-Type": "multipart/form-data; boundary=x"}
    async with target.client() as client:
        await repeat(AT_ONCE, lambda: target.send(client, "POST", "/v1/inputs", data=next(bodies), headers=head))


async def large_json(target: Target) -> None:
    """JSON of the largest size with invalid values only."""
    data = b'{"url": "https://a", "events": [' + b"1," * 500_000 + b"1]}"
    head = {"Content-Type": "application/json"}
    async with target.client() as client:
        await repeat(AT_ONCE, lambda: target.send(client, "POST", "/v1/webhooks", data=data, headers=head))


async def large_files(target: Target) -> None:
    """Files of 100 MB without end."""
    data = b'{"custom_id": "a"}\n' * 5_000_000
    async with target.client() as client:

        async def one() -> None:
            form = aiohttp.FormData({"purpose": "batch"})
            form.add_field("file", data, filename="a.jsonl")
            await target.send(client, "POST", "/v1/files", data=form)

        await repeat(4, one)


async def slow_downloads(target: Target) -> None:
    """Reads of a file of 20 MB by clients that read as slowly as the API allows."""
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", b'{"custom_id": "a"}\n' * 1_000_000, filename="a.jsonl")
    async with target.client() as client:
        file = await target.send(client, "POST", "/v1/files", data=form)
    head = f"GET /v1/files/{file['id']}/content HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {target.key}"

    async def one() -> None:
        loop = asyncio.get_running_loop()
        with socket.socket() as connection, contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 * 1024)  # the system's can hold megabytes
            connection.setblocking(False)
            connection.bind(ADDRESS)
            await loop.sock_connect(connection, ("127.0.0.1", target.port))
            await loop.sock_sendall(connection, f"{head}\r\n\r\n".encode())
            status = (await loop.sock_recv(connection, 1_000)).decode("latin-1")[9:12]
            target.counts[status] += 1
            while status == "200" and await loop.sock_recv(connection, 16 * 1024):
                await asyncio.sleep(READ_EVERY_S)
        await asyncio.sleep(PAUSE_S)

    await repeat(DOWNLOADS, one)


ATTACKS: dict[str, Attack] = {
    "39-megapixel PNGs": large_pngs,
    "40-megapixel WebPs": large_webps,
    "endless inputs": small_inputs,
    "20 MB bodies": large_bodies,
    "100 MB files": large_files,
    "held lines": held_lines,
    "large forms": large_forms,
    "large JSON": large_json,
    "large images in batches": large_images_in_batches,
    "slow downloads": slow_downloads,
}
