"""The asynchronous client."""

import asyncio
import json
import os
import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from itertools import islice
from pathlib import Path
from typing import Any, Self, TypeAlias, TypeVar

import httpx
from httpx_sse import aconnect_sse

from fusequeue.errors import Unreachable, WaitTimeout
from fusequeue.resources import DeadLetter, Event, Job, LineResult, Scale, event
from fusequeue.transport import UNAVAILABLE, Transport, refusal, unreachable

ImageSource: TypeAlias = str | Path | bytes
"""Id of an uploaded image, an https or data URL, a file, or its bytes."""

DEFAULT_URL = "http://127.0.0.1:8000"
LINES_PER_REQUEST = 1_000
MAX_WAIT_S = 30.0  # of one request
IMAGE_FIELDS = ("image", "mask", "last_image")

R = TypeVar("R", Job, DeadLetter)


class AsyncClient:
    """A fusequeue service.

    `base_url` defaults to FUSEQUEUE_URL, else the address of `fusequeue up`; `api_key` to FUSEQUEUE_API_KEY. Failed
    requests are retried up to `retries` times, or for a minute while a known service restarts; Idempotency-Keys keep a
    repeated submit from enqueueing twice. Use the client as an async context manager, or call `aclose`.
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

    async def submit(self, /, model: str, prompt: str, *, idempotency_key: str | None = None, **fields: Any) -> Job:
        """Submit a job; `fields` are those of `POST /v1/jobs`. Files and bytes of images are uploaded."""
        body = {"model": model, "prompt": prompt, **await self._with_image_ids(fields)}
        key = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        return Job.model_validate(await self._http.json("POST", "/v1/jobs", json=body, headers=key))

    async def submit_many(
        self, bodies: Iterable[Mapping[str, Any] | None], *, idempotency_key: str | None = None
    ) -> AsyncGenerator[LineResult]:
        """Submit any number of jobs and yield their results in order.

        A repeated body at the same position under the same key is enqueued once; None leaves a position empty.
        `bodies` is consumed lazily.
        """
        key, lines, first = idempotency_key or uuid.uuid4().hex, iter(bodies), 1
        while chunk := list(islice(lines, LINES_PER_REQUEST)):
            for result in await self._submit_chunk(chunk, f"{key}-{first}"):
                yield result.model_copy(update={"line": first + result.line - 1})
            first += len(chunk)

    async def _submit_chunk(self, bodies: Sequence[Mapping[str, Any] | None], key: str) -> list[LineResult]:
        """Submit the lines of one request. Lines refused temporarily are sent again among blank lines.

        The service identifies a line by its position, so that none is enqueued twice.
        """
        results: dict[int, LineResult] = {}
        pending = {
            line: json.dumps(body, separators=(",", ":")) for line, body in enumerate(bodies, 1) if body is not None
        }
        count = len(pending)
        if not count:
            return []
        headers = {"Idempotency-Key": key, "Content-Type": "application/x-ndjson"}
        for attempt in range(self._http.retries + 1):
            content = "".join(f"{pending.get(line, '')}\n" for line in range(1, len(bodies) + 1))
            response = await self._http.send("POST", "/v1/jobs:bulk", content=content.encode(), headers=headers)
            rows = [json.loads(line) for line in response.text.splitlines()]
            results |= {row["line"]: LineResult.model_validate(row) for row in rows if row["line"] is not None}
            done = {line for line, result in results.items() if not (result.error and result.error.retryable)}
            pending = {line: text for line, text in pending.items() if line not in done}
            retry_after_s = max((row["error"].get("retry_after_s", 0) for row in rows if "error" in row), default=0)
            if not pending or not await self._http.pause(attempt, retry_after_s or None):
                break
        if len(results) < count:
            raise Unreachable(f"{count - len(results)} of {count} lines got no response")
        return [results[line] for line in sorted(results)]

    async def upload(self, image: Path | bytes) -> str:
        """Upload an image as an input for jobs and return its id."""
        file = ("image", image) if isinstance(image, bytes) else (image.name, await asyncio.to_thread(image.read_bytes))
        return str((await self._http.json("POST", "/v1/inputs", files={"file": file}))["id"])

    async def _with_image_ids(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        body: dict[str, Any] = {
            name: await self._image_id(value) if name in IMAGE_FIELDS else value for name, value in fields.items()
        }
        if "images" in body:
            body["images"] = [await self._image_id(image) for image in body["images"]]
        if "controls" in body:
            body["controls"] = [{**one, "image": await self._image_id(one["image"])} for one in body["controls"]]
        return body

    async def _image_id(self, image: ImageSource) -> str:
        return image if isinstance(image, str) else await self.upload(image)

    async def get(self, job_id: str, *, wait_s: float | None = None) -> Job:
        """Return a job; with `wait_s`, when it has ended or after that time."""
        query = {} if wait_s is None else {"wait": f"{wait_s:.3f}"}
        return Job.model_validate(await self._http.json("GET", f"/v1/jobs/{job_id}", params=query))

    async def wait(self, job_id: str, *, timeout_s: float | None = None) -> Job:
        """Return the job once it has ended in any state; raises `WaitTimeout` after `timeout_s`."""
        start = time.monotonic()
        left = timeout_s
        while True:
            job = await self.get(job_id, wait_s=MAX_WAIT_S if left is None else min(MAX_WAIT_S, max(left, 0.0)))
            if job.ended:
                return job
            if timeout_s is not None:
                left = timeout_s - (time.monotonic() - start)
                if left <= 0:
                    raise WaitTimeout(job, timeout_s)

    async def events(self, job_id: str) -> AsyncGenerator[Event]:
        """Yield the current state, every change and step, and last the whole job; reconnects when the stream breaks."""
        last_id, failures = "", 0
        while True:
            try:
                async with aclosing(self._events(job_id, last_id)) as stream:
                    async for event_id, job_event in stream:
                        last_id, failures = event_id or last_id, 0
                        yield job_event
                        if job_event.job is not None:
                            return
            except Unreachable:
                if failures >= self._http.retries:
                    raise
            job = await self.get(job_id)  # it may have ended while the stream was broken
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
                if source.response.status_code in UNAVAILABLE:
                    raise httpx.RemoteProtocolError(f"HTTP status {source.response.status_code}")
                self._http.responded = True
                if source.response.is_error:
                    await source.response.aread()
                    raise refusal(source.response)
                if source.response.status_code == httpx.codes.NO_CONTENT:
                    return
                async for message in source.aiter_sse():
                    yield message.id, event(message.json())
        except httpx.TransportError as error:
            raise unreachable(client.base_url, error) from error

    def jobs(self, /, *, limit: int | None = None, **filters: Any) -> AsyncGenerator[Job]:
        """Yield jobs, newest first, up to `limit`; `filters` are those of `GET /v1/jobs`, e.g. `status="failed"`."""
        return self._pages(Job, "/v1/jobs", limit, filters)

    async def _pages(
        self, kind: type[R], path: str, limit: int | None, filters: Mapping[str, Any]
    ) -> AsyncGenerator[R]:
        query = {name: value for name, value in filters.items() if value is not None}
        yielded = 0
        while limit is None or yielded < limit:
            size = 100 if limit is None else min(100, limit - yielded)
            page = await self._http.json("GET", path, params={**query, "limit": size})
            for row in page["data"]:
                yield kind.model_validate(row)
            yielded += len(page["data"])
            if not page["has_more"]:
                return
            query["after"] = page["next_cursor"]

    async def cancel(self, job_id: str) -> Job:
        """Cancel a job: at once while it is queued, at its next step while it runs."""
        return Job.model_validate(await self._http.json("POST", f"/v1/jobs/{job_id}/cancel"))

    async def delete(self, job_id: str) -> None:
        """Delete an ended job and its images."""
        await self._http.send("DELETE", f"/v1/jobs/{job_id}", removes=True)

    async def download(self, job: Job, folder: Path, *, name: str | None = None) -> list[Path]:
        """Save results as `folder/name-index.ext`, atomically, and return the files; `name` defaults to the job id."""
        await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
        files = []
        for artifact in job.artifacts:
            extension = artifact.content_type.rpartition("/")[2].replace("jpeg", "jpg")
            path = folder / f"{name or job.id}-{artifact.index}.{extension}"
            part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
            await asyncio.to_thread(_write, part, path, await self.read(artifact.url))
            files.append(path)
        return files

    async def read(self, url: str) -> bytes:
        """Return the bytes of an artifact."""
        return (await self._http.send("GET", url)).content

    async def models(self) -> list[dict[str, Any]]:
        """Return the models with their defaults and limits."""
        return list((await self._http.json("GET", "/v1/models"))["data"])

    async def queues(self) -> list[dict[str, Any]]:
        """Return queued and running jobs by signature."""
        return list((await self._http.json("GET", "/v1/queues"))["data"])

    async def workers(self) -> list[dict[str, Any]]:
        """Return the workers that are alive."""
        return list((await self._http.json("GET", "/v1/workers"))["data"])

    async def scale(self, pool: str = "default") -> Scale:
        """Return how many workers the service wants; `pool` is its namespace."""
        return Scale.model_validate(await self._http.json("GET", f"/v1/scale/{pool}"))

    def dead_letters(self, *, limit: int | None = None) -> AsyncGenerator[DeadLetter]:
        """Yield dead letters, newest first, up to `limit`."""
        return self._pages(DeadLetter, "/v1/dead-letters", limit, {})

    async def dead_letter(self, letter_id: str) -> DeadLetter:
        """Return one dead letter by its job's id."""
        return DeadLetter.model_validate(await self._http.json("GET", f"/v1/dead-letters/{letter_id}"))

    async def redrive(self, letter_id: str) -> None:
        """Queue the job of a dead letter again."""
        await self._http.send("POST", f"/v1/dead-letters/{letter_id}/redrive", removes=True)

    async def purge(self, letter_id: str) -> None:
        """Delete a dead letter and the record of its job."""
        await self._http.send("DELETE", f"/v1/dead-letters/{letter_id}", removes=True)


def _write(part: Path, path: Path, data: bytes) -> None:
    try:
        part.write_bytes(data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
