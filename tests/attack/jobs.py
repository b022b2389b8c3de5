"""Attacks on the queue and on what waits for it, with a key."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from typing import Any

import aiohttp

from attack.attacks import Attack, Target, repeat

STREAMS = 2_000
BACKLOG = 1_000  # before the job of the streams, so that it does not end
INTERACTIVE_AT_ONCE = 40
BULK_LINES = 100_000
SIGNATURES = 200
JOB = {"model": "alpha", "prompt": "an attack"}
SLOW_JOB = {**JOB, "steps": 150, "priority": "bulk"}


async def event_streams(target: Target) -> None:
    """As many event streams and waiting requests as the API allows."""
    async with target.client() as client:
        await _bulk(target, client, [SLOW_JOB] * BACKLOG)
        job = await target.send(client, "POST", "/v1/jobs", json=SLOW_JOB)
        numbers = itertools.count()

        async def one() -> None:
            number = next(numbers)
            await _stream(target, client, f"/v1/jobs/{job['id']}" + ("/events" if number % 2 else "?wait=60"))

        await repeat(STREAMS, one)


async def batch_streams(target: Target) -> None:
    """As many streams of a batch's events as the API allows: each of them reads the batch once a second."""
    async with target.client() as client:
        form = aiohttp.FormData({"purpose": "batch"})
        line = {"custom_id": "a", "method": "POST", "url": "/v1/jobs", "body": SLOW_JOB}
        lines = (json.dumps({**line, "custom_id": str(number)}) for number in range(BACKLOG))
        form.add_field("file", "\n".join(lines).encode(), filename="a.jsonl")
        file = await target.send(client, "POST", "/v1/files", data=form)
        body = {"input_file_id": file["id"], "endpoint": "/v1/jobs"}
        batch = await target.send(client, "POST", "/v1/batches", json=body)
        await repeat(STREAMS, lambda: _stream(target, client, f"/v1/batches/{batch['id']}/events"))


async def _stream(target: Target, client: aiohttp.ClientSession, path: str) -> None:
    with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
        async with client.get(path) as response:
            target.counts[str(response.status)] += 1
            async for _ in response.content:
                pass
    await asyncio.sleep(0.2)


async def filtered_lists(target: Target) -> None:
    """Lists with a filter that matches no job: each reads a thousand records."""
    async with target.client() as client:
        await _bulk(target, client, [{**JOB, "priority": "bulk"}] * 1_500)
        await repeat(64, lambda: target.send(client, "GET", "/v1/jobs?metadata.none=1&limit=100"))


async def canceled_jobs(target: Target) -> None:
    """Jobs that are canceled at once: each leaves a record."""
    async with target.client() as client:

        async def one() -> None:
            body = {**JOB, "prompt": "x" * 3_000, "metadata": {str(key): "y" * 500 for key in range(16)}}
            if job := await target.send(client, "POST", "/v1/jobs", json=body):
                await target.send(client, "POST", f"/v1/jobs/{job['id']}/cancel")

        await repeat(16, one)


async def interactive_flood(target: Target) -> None:
    """A steady supply of interactive jobs."""
    await _supply(target, INTERACTIVE_AT_ONCE, lambda number: {**JOB, "priority": "interactive", "n": 4, "steps": 20})


async def many_signatures(target: Target) -> None:
    """A backlog of jobs in 200 signatures."""
    sizes = list(itertools.islice(itertools.product(range(16, 136, 8), range(16, 136, 8)), SIGNATURES))

    def body(number: int) -> dict[str, Any]:
        width, height = sizes[number % SIGNATURES]
        priority = ("interactive", "standard")[number % 2]
        return {**JOB, "width": width, "height": height, "priority": priority, "steps": 10}

    await _supply(target, 1_000, body)


async def _supply(target: Target, queued: int, body: Any) -> None:
    """Submit jobs in bulk whenever fewer than `queued` of them wait."""
    async with target.client() as client:
        numbers, ids = itertools.count(), []
        while True:
            waiting = await target.send(client, "GET", "/v1/jobs?status=queued&limit=100")
            missing = queued - len(waiting.get("data", ())) if queued <= 100 else queued
            ids = [body(next(numbers)) for _ in range(max(0, missing))]
            if ids:
                await _bulk(target, client, ids)
            await asyncio.sleep(0.05 if queued <= 100 else 2)


async def _bulk(target: Target, client: aiohttp.ClientSession, bodies: list[dict[str, Any]]) -> None:
    data = "\n".join(map(json.dumps, bodies)).encode()
    await target.send(client, "POST", "/v1/jobs:bulk", data=data, headers={"Content-Type": "application/x-ndjson"})


async def bulk_requests(target: Target) -> None:
    """Bulk requests of 100,000 lines."""
    async with target.client() as client:
        await repeat(4, lambda: _bulk(target, client, [{**JOB, "priority": "bulk"}] * BULK_LINES))


async def batch_files(target: Target) -> None:
    """Batches of as many lines as one may have, one after the other."""
    line = {"method": "POST", "url": "/v1/jobs", "body": JOB}
    data = b"".join(json.dumps({**line, "custom_id": str(number)}).encode() + b"\n" for number in range(50_000))
    async with target.client() as client:

        async def one() -> None:
            form = aiohttp.FormData({"purpose": "batch"})
            form.add_field("file", data, filename="a.jsonl")
            if file := await target.send(client, "POST", "/v1/files", data=form):
                body = {"input_file_id": file["id"], "endpoint": "/v1/jobs"}
                await target.send(client, "POST", "/v1/batches", json=body)

        await repeat(2, one)


ATTACKS: dict[str, Attack] = {
    "event streams": event_streams,
    "batch streams": batch_streams,
    "filtered lists": filtered_lists,
    "canceled jobs": canceled_jobs,
    "interactive flood": interactive_flood,
    "200 signatures": many_signatures,
    "bulk requests": bulk_requests,
    "batch files": batch_files,
}
