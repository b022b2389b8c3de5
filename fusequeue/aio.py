"""The client for programs that run an event loop."""

from __future__ import annotations

import asyncio
import json
import os
import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from itertools import islice
from pathlib import Path
from typing import Any, Self, TypeAlias

import httpx
from httpx_sse import aconnect_sse

from fusequeue.errors import Unreachable, WaitTimeout
from fusequeue.models import DeadLetter, Event, Job, LineResult, Scale, event
from fusequeue.transport import AWAY, Transport, refusal, unreachable

ImageSource: TypeAlias = str | Path | bytes
"""An id of an uploaded picture, an https or data URL, a file, or the bytes of one."""

DEFAULT_URL = "http://127.0.0.1:8000"
LINES_A_REQUEST = 1_000
POLL_S = 30.0  # longest wait that one request asks for
DOWNLOAD_PIECE = 1 << 18
PICTURE_FIELDS = ("image", "mask", "last_image")


class AsyncClient:
    """A fusequeue service.

    `base_url` is FUSEQUEUE_URL unless told, else the address of `fusequeue up`; `api_key` is FUSEQUEUE_API_KEY
    unless told. What may be tried again is, up to `retries` times and never twice in effect: submits carry an
    Idempotency-Key. A service that has answered and then is away is given a minute to come back. Use the client as
    an async context manager, or call `aclose`.
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        timeout_s: float = 60.0,
        retries: int = 5,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        key = api_key or os.environ.get("FUSEQUEUE_API_KEY")
        self._http = Transport(
            httpx.AsyncClient(
                base_url=base_url or os.environ.get("FUSEQUEUE_URL") or DEFAULT_URL,
                headers={"Authorization": f"Bearer {key}"} if key else {},
                timeout=httpx.Timeout(timeout_s, pool=None),
                transport=transport,
            ),
            retries,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.client.aclose()

    # Submitting.

    async def submit(self, model: str, prompt: str, *, idempotency_key: str | None = None, **fields: Any) -> Job:
        """Submit a job; `fields` are those of `POST /v1/jobs`. Pictures may be files or bytes, and are uploaded."""
        body = {"model": model, "prompt": prompt, **await self._with_pictures(fields)}
        key = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        return Job.model_validate(await self._http.json("POST", "/v1/jobs", json=body, headers=key))

    async def submit_many(
        self, bodies: Iterable[Mapping[str, Any] | None], *, idempotency_key: str | None = None
    ) -> AsyncGenerator[LineResult]:
        """Submit jobs by the thousand, and yield what became of each, in order.

        With the same key and the same body in the same place again, no job is enqueued twice; None leaves a place
        empty. `bodies` is read as it is needed.
        """
        key, lines, first = idempotency_key or uuid.uuid4().hex, iter(bodies), 1
        while piece := list(islice(lines, LINES_A_REQUEST)):
            for result in await self._bulk(piece, f"{key}-{first}"):
                yield result.model_copy(update={"line": first + result.line - 1})
            first += len(piece)

    async def _bulk(self, bodies: Sequence[Mapping[str, Any] | None], key: str) -> list[LineResult]:
        """Submit one request's worth; lines that are refused for now are sent again, in their place among blank ones.

        The place is what the service knows a line by, so that nothing is enqueued twice.
        """
        results: dict[int, LineResult] = {}
        asked = {line: body for line, body in enumerate(bodies, start=1) if body is not None}
        waiting = {line: json.dumps(body, separators=(",", ":")) for line, body in asked.items()}
        if not asked:
            return []
        headers = {"Idempotency-Key": key, "Content-Type": "application/x-ndjson"}
        for attempt in range(self._http.retries + 1):
            content = "".join(f"{waiting.get(line, '')}\n" for line in range(1, len(bodies) + 1))
            answer = await self._http.send("POST", "/v1/jobs:bulk", content=content.encode(), headers=headers)
            told = [json.loads(line) for line in answer.text.splitlines()]
            results |= {one["line"]: LineResult.model_validate(one) for one in told if one["line"] is not None}
            waiting = {line: text for line, text in waiting.items() if line not in results or _for_now(results[line])}
            retry_after_s = max((one["error"].get("retry_after_s", 0) for one in told if "error" in one), default=0)
            if not waiting or not await self._http.pause(attempt, retry_after_s or None):
                break
        if len(results) < len(asked):
            raise Unreachable(f"{len(asked) - len(results)} of {len(asked)} lines got no answer")
        return [results[line] for line in sorted(results)]

    async def upload(self, picture: Path | bytes) -> str:
        """Store a picture for jobs to start from, and return its id."""
        data = picture if isinstance(picture, bytes) else await asyncio.to_thread(picture.read_bytes)
        name = "picture" if isinstance(picture, bytes) else picture.name
        answer = await self._http.json("POST", "/v1/inputs", files={"file": (name, data)})
        return str(answer["id"])

    async def _with_pictures(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        made = dict(fields)
        for name in PICTURE_FIELDS:
            if name in made:
                made[name] = await self._stored(made[name])
        if "images" in made:
            made["images"] = [await self._stored(picture) for picture in made["images"]]
        return made

    async def _stored(self, picture: ImageSource) -> str:
        return picture if isinstance(picture, str) else await self.upload(picture)

    # Following.

    async def get(self, job_id: str, *, wait_s: float | None = None) -> Job:
        """Read a job; with `wait_s`, once it has ended or after that time."""
        query = {} if wait_s is None else {"wait": f"{wait_s:.3f}"}
        return Job.model_validate(await self._http.json("GET", f"/v1/jobs/{job_id}", params=query))

    async def wait(self, job_id: str, *, timeout_s: float | None = None) -> Job:
        """Return the job once it has ended, however it did; raises `WaitTimeout` after `timeout_s`."""
        start = time.monotonic()
        left = timeout_s
        while True:
            job = await self.get(job_id, wait_s=POLL_S if left is None else min(POLL_S, max(left, 0.0)))
            if job.ended:
                return job
            if timeout_s is not None:
                left = timeout_s - (time.monotonic() - start)
                if left <= 0:
                    raise WaitTimeout(job, timeout_s)

    async def events(self, job_id: str) -> AsyncGenerator[Event]:
        """Yield the job's state now, every change and step, and at last the whole job; comes back when cut off."""
        last_id, failures = "", 0
        while True:
            try:
                async with aclosing(self._events(job_id, last_id)) as stream:
                    async for number, told in stream:
                        last_id, failures = number or last_id, 0
                        yield told
                        if told.job is not None:
                            return
            except Unreachable:
                if failures >= self._http.retries:
                    raise
            job = await self.get(job_id)  # it may have ended while nobody listened
            if job.ended:
                yield Event(id=job.id, status=job.status, progress=job.progress, job=job)
                return
            failures += 1
            await self._http.pause(failures, None)

    async def _events(self, job_id: str, last_id: str) -> AsyncGenerator[tuple[str, Event]]:
        headers = {"Last-Event-ID": last_id} if last_id else {}
        client = self._http.client
        try:
            async with aconnect_sse(client, "GET", f"/v1/jobs/{job_id}/events", headers=headers) as source:
                if source.response.status_code in AWAY:
                    raise httpx.RemoteProtocolError(f"answered {source.response.status_code}")
                self._http.known = True
                if source.response.is_error:
                    await source.response.aread()
                    raise refusal(source.response)
                if source.response.status_code == httpx.codes.NO_CONTENT:
                    return
                async for message in source.aiter_sse():
                    if message.data:  # the first one only says how soon to come back
                        yield message.id, event(message.json())
        except httpx.TransportError as error:
            raise unreachable(client.base_url, error) from error

    async def jobs(self, *, limit: int | None = None, **filters: Any) -> AsyncGenerator[Job]:
        """Yield jobs, newest first, up to `limit`; `filters` are those of `GET /v1/jobs`, e.g. `status="failed"`."""
        async with aclosing(self._pages("/v1/jobs", limit, filters)) as rows:
            async for told in rows:
                yield Job.model_validate(told)

    async def _pages(
        self, path: str, limit: int | None, filters: Mapping[str, Any] | None = None
    ) -> AsyncGenerator[dict[str, Any]]:
        query = {name: value for name, value in (filters or {}).items() if value is not None}
        yielded = 0
        while limit is None or yielded < limit:
            size = 100 if limit is None else min(100, limit - yielded)
            page = await self._http.json("GET", path, params={**query, "limit": size})
            for told in page["data"]:
                yield told
            yielded += len(page["data"])
            if not page["has_more"]:
                return
            query["after"] = page["next_cursor"]

    async def cancel(self, job_id: str) -> Job:
        """Cancel a job: at once while it waits, at its next step while it runs."""
        return Job.model_validate(await self._http.json("POST", f"/v1/jobs/{job_id}/cancel"))

    async def delete(self, job_id: str) -> None:
        """Delete a job that has ended, with its pictures."""
        await self._http.send("DELETE", f"/v1/jobs/{job_id}")

    # Results.

    async def download(self, job: Job, folder: Path, *, name: str | None = None) -> list[Path]:
        """Save what a job made as `folder/name-index.ext` (`name` is its id unless told), and return the files.

        A file appears whole or not at all.
        """
        await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
        files = []
        for artifact in job.artifacts:
            ending = artifact.content_type.rpartition("/")[2].replace("jpeg", "jpg")
            path = folder / f"{name or job.id}-{artifact.index}.{ending}"
            await self._save(artifact.url, path)
            files.append(path)
        return files

    async def read(self, url: str) -> bytes:
        """Return the bytes of an artifact."""
        return (await self._http.send("GET", url)).content

    async def _save(self, url: str, path: Path) -> None:
        data = await self.read(url)
        part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
        await asyncio.to_thread(_write, part, path, data)

    # The service.

    async def models(self) -> list[dict[str, Any]]:
        """Return the models that are served, with their defaults and limits."""
        return list((await self._http.json("GET", "/v1/models"))["data"])

    async def queues(self) -> list[dict[str, Any]]:
        """Return what waits and runs, signature by signature."""
        return list((await self._http.json("GET", "/v1/queues"))["data"])

    async def workers(self) -> list[dict[str, Any]]:
        """Return the workers that are alive."""
        return list((await self._http.json("GET", "/v1/workers"))["data"])

    async def scale(self, pool: str = "default") -> Scale:
        """Return how many workers are wanted now; `pool` is the service's namespace."""
        return Scale.model_validate(await self._http.json("GET", f"/v1/scale/{pool}"))

    async def dead_letters(self, *, limit: int | None = None) -> AsyncGenerator[DeadLetter]:
        """Yield jobs that were given up, newest first, up to `limit`."""
        async with aclosing(self._pages("/v1/dead-letters", limit)) as rows:
            async for told in rows:
                yield DeadLetter.model_validate(told)

    async def dead_letter(self, letter_id: str) -> DeadLetter:
        """Read one dead letter; its id is its job's."""
        return DeadLetter.model_validate(await self._http.json("GET", f"/v1/dead-letters/{letter_id}"))

    async def redrive(self, letter_id: str) -> None:
        """Put a dead letter's job back in line."""
        await self._http.send("POST", f"/v1/dead-letters/{letter_id}/redrive")

    async def purge(self, letter_id: str) -> None:
        """Delete a dead letter, and the record of its job."""
        await self._http.send("DELETE", f"/v1/dead-letters/{letter_id}")


def _for_now(result: LineResult) -> bool:
    return result.error is not None and result.error.retryable


def _write(part: Path, path: Path, data: bytes) -> None:
    try:
        part.write_bytes(data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
