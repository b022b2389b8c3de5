"""A client that submits the planned jobs and remembers every acknowledgement."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from typing import Any

import aiohttp

from chaos.plan import PlannedJob
from chaos.request import Request, ended
from shared.job import State

REQUEST_TIMEOUT_S = 20.0
GIVE_UP_S = 90.0
MAX_CONNECTIONS = 256  # a tenth of the outstanding jobs and more are waited for
_RETRIED = {429, 503}


class Client:
    """Submits jobs at `url`; a request with a key is repeated until it is answered."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.requests: list[Request] = []
        self._by_number: dict[int, Request] = {}
        self.statuses: Counter[int] = Counter()
        self.faults: list[str] = []
        self.retries_refused = 0  # their source has no result, and no retry
        self.given_up = 0  # requests that are refused, or without a response: they could submit a second job
        self._tasks: set[asyncio.Task[None]] = set()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        self._session = aiohttp.ClientSession(
            self.url, timeout=timeout, connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        assert self._session is not None
        await self._session.close()

    def forget(self) -> None:
        """Expect nothing of the requests sent so far."""
        for request in self.requests:
            request.forgotten = True

    @property
    def acknowledged(self) -> dict[str, Request]:
        return {job_id: request for request in self.requests for job_id in request.job_ids}

    @property
    def retries(self) -> int:
        """Return how many jobs are retries."""
        return sum(len(request.retries) for request in self.requests)

    async def ready(self) -> None:
        """Wait until the API is ready."""
        deadline = time.monotonic() + GIVE_UP_S
        while (await self._call("GET", "/readyz"))[0] != 200:
            if time.monotonic() > deadline:
                raise TimeoutError("the API is not ready; see api.log")
            await asyncio.sleep(0.1)

    async def add_webhook(self, url: str) -> None:
        """Subscribe to the ends of all jobs."""
        status, body = await self._call("POST", "/v1/webhooks", json={"url": url})
        assert status == 201, (status, body)

    async def submit(self, *jobs: PlannedJob) -> None:
        """Submit one job as often as planned, or several in a bulk request; start what the client does afterwards."""
        requests = [self._request(one) for one in jobs]
        earlier = {
            id(one): one for request in requests for one in (*request.parents, request.source) if one is not None
        }
        for parent in earlier.values():
            if parent not in requests:
                await parent.answered.wait()
        if len(requests) > 1:
            await self._submit_bulk(requests)
        else:
            for _ in range(jobs[0].sends):
                await self._submit(requests[0])
        for request in requests:
            request.answered.set()
            self._follow(request)

    def _request(self, planned: PlannedJob) -> Request:
        source = None if planned.source is None else self._by_number[planned.source.number]
        request = Request(planned, tuple(self._by_number[number] for number in planned.after), source)
        self.requests.append(request)
        self._by_number[planned.number] = request
        return request

    def _follow(self, request: Request) -> None:
        planned = request.planned
        for job_id in request.job_ids:
            if planned.cancel_after_s is not None:
                self._start(self._cancel(request, job_id, planned.cancel_after_s))
            if planned.pauses:
                self._start(self._pause(request, job_id))
            if planned.watch == "poll":
                self._start(self._poll(request, job_id))
            elif planned.watch == "sse":
                self._start(self._stream(request, job_id))
            if planned.deleted:
                self._start(self._delete(request, job_id))
        if planned.retried:
            self._start(self._retry(request))
        else:
            request.retried.set()

    async def finish(self) -> None:
        """Wait for the cancellations, polls and streams."""
        await asyncio.gather(*self._tasks)

    def _start(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _submit(self, request: Request) -> None:
        headers = {"Idempotency-Key": request.planned.token} if request.planned.key else {}
        deadline = time.monotonic() + GIVE_UP_S
        while time.monotonic() < deadline:
            status, body = await self._call("POST", "/v1/jobs", json=request.body(), headers=headers)
            if status in (200, 202):
                request.job_ids.add(str(body["id"]))
                return
            request.refused += status in _RETRIED
            request.unanswered += status == 0
            if status == 422 and request.is_refused(body["error"]):
                return self._give_up(request)
            if status not in (0, *_RETRIED):
                if not (request.forgotten and status == 409):  # the job of its key is gone
                    self.faults.append(f"submit {request.planned.token}: {status} {body}")
                return
            if not request.planned.key:
                return self._give_up(request)
            await asyncio.sleep(random.uniform(0.1, 0.4))
        self.faults.append(f"submit {request.planned.token}: no answer for {GIVE_UP_S:g} s")

    def _give_up(self, request: Request) -> None:
        if not request.forgotten and not request.job_ids:
            self.given_up += 1

    async def _submit_bulk(self, requests: list[Request]) -> None:
        """Repeat a bulk request, which has one key for all lines, until each line has been accepted."""
        body = b"".join(_line(request, tuple(requests)) for request in requests)
        headers = {"Idempotency-Key": f"bulk-{requests[0].planned.token}", "Content-Type": "application/x-ndjson"}
        deadline = time.monotonic() + GIVE_UP_S
        assert self._session is not None
        while not all(request.job_ids or request.refused_parent for request in requests):
            if time.monotonic() > deadline:
                self.faults.append(f"bulk {requests[0].planned.token}: not accepted for {GIVE_UP_S:g} s")
                return
            try:
                async with self._session.post("/v1/jobs:bulk", data=body, headers=headers) as response:
                    async for line in response.content:
                        self._bulk_result(requests, json.loads(line))
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
                for request in requests:
                    request.unanswered += not (request.job_ids or request.refused_parent)
            await asyncio.sleep(random.uniform(0.1, 0.4))

    def _bulk_result(self, requests: list[Request], result: dict[str, Any]) -> None:
        request = requests[result["line"] - 1] if result["line"] else requests[0]
        if "error" not in result:
            request.job_ids.add(str(result["id"]))
        elif result["error"]["retryable"]:
            request.refused += bool(result["line"])
        elif not request.refused_parent and request.is_refused(result["error"]):
            self._give_up(request)
        elif not request.refused_parent:
            self.faults.append(f"bulk {requests[0].planned.token}: {result}")

    async def _call(self, method: str, path: str, **options: Any) -> tuple[int, dict[str, Any]]:
        """Return status and body; status 0: no response."""
        assert self._session is not None
        try:
            async with self._session.request(method, path, **options) as response:
                body = await response.json(content_type=None) if response.status != 204 else {}
                self.statuses[response.status] += 1
                return response.status, body
        except (aiohttp.ClientError, TimeoutError, OSError, json.JSONDecodeError):
            self.statuses[0] += 1
            return 0, {}

    async def _persistently(self, request: Request, method: str, path: str, **options: Any) -> dict[str, Any]:
        """Repeat a call until it is answered; the body is empty if it never is."""
        deadline = time.monotonic() + GIVE_UP_S
        while time.monotonic() < deadline:
            status, body = await self._call(method, path, **options)
            if status == 200:
                return body
            if status not in (0, *_RETRIED):
                if not (status == 404 and (request.forgotten or request.is_deleting)):
                    self.faults.append(f"{method} {path}: {status} {body}")
                return {}
            await asyncio.sleep(random.uniform(0.1, 0.4))
        self.faults.append(f"{method} {path}: no answer for {GIVE_UP_S:g} s")
        return {}

    async def _cancel(self, request: Request, job_id: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        body = await self._persistently(request, "POST", f"/v1/jobs/{job_id}/cancel")
        request.note_end(body)
        request.canceled = body.get("status") == State.CANCELED
        request.cancel_accepted = body.get("status") == State.RUNNING and bool(body.get("cancel_requested"))

    async def _delete(self, request: Request, job_id: str) -> None:
        """Delete a job that has ended, once no other one starts from it."""
        await self._poll(request, job_id)
        deadline = time.monotonic() + GIVE_UP_S
        while time.monotonic() < deadline and not request.forgotten:
            request.is_deleting = True
            status, body = await self._call("DELETE", f"/v1/jobs/{job_id}")
            if status in (204, 404):  # 404: the reply of an earlier deletion was lost
                request.deleted.add(job_id)
                return
            request.needed += status == 409
            if status not in (0, 409, *_RETRIED):
                self.faults.append(f"DELETE {job_id}: {status} {body}")
                return
            await asyncio.sleep(random.uniform(0.1, 0.4))
        if not request.forgotten:
            self.faults.append(f"DELETE {job_id}: refused for {GIVE_UP_S:g} s")

    async def _retry(self, request: Request) -> None:
        """Retry the jobs of a request that end without a result, after that of its source."""
        try:
            for job_id in tuple(request.job_ids):
                await self._poll(request, job_id)
                if request.source is not None:
                    await request.source.retried.wait()
                if not request.forgotten and State.SUCCEEDED not in request.seen_ends:
                    await self._retry_job(request, job_id)
        finally:
            request.retried.set()
        for job_id in request.retries.values():
            body: dict[str, Any] = {"id": job_id}
            while body and not ended(body):
                body = await self._persistently(request, "GET", f"/v1/jobs/{job_id}", params={"wait": "5"})

    async def _retry_job(self, request: Request, job_id: str) -> None:
        deadline = time.monotonic() + GIVE_UP_S
        while time.monotonic() < deadline and not request.forgotten:
            status, body = await self._call("POST", f"/v1/jobs/{job_id}/retry")
            if status == 202:
                request.retries[job_id] = str(body["id"])
                return
            if status == 422 and request.source is not None:
                self.retries_refused += 1
                return
            if status not in (0, *_RETRIED) and not request.forgotten:
                self.faults.append(f"retry of {job_id}: {status} {body}")
                return
            await asyncio.sleep(random.uniform(0.1, 0.4))

    async def _pause(self, request: Request, job_id: str) -> None:
        for after_s, for_s in request.planned.pauses:
            await asyncio.sleep(after_s)
            body = await self._persistently(request, "POST", f"/v1/jobs/{job_id}/pause")
            ended, since_s = request.note_end(body), time.time()
            await asyncio.sleep(0 if ended else for_s)
            if body.get("status") == State.QUEUED and body.get("paused_at"):
                request.paused.append((job_id, since_s, time.time()))
            request.note_end(await self._persistently(request, "POST", f"/v1/jobs/{job_id}/resume"))

    async def _poll(self, request: Request, job_id: str) -> None:
        while True:
            body = await self._persistently(request, "GET", f"/v1/jobs/{job_id}", params={"wait": "5"})
            if not body or request.note_end(body):
                return

    async def _stream(self, request: Request, job_id: str) -> None:
        deadline, last = time.monotonic() + GIVE_UP_S, ""
        while time.monotonic() < deadline:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                status, ended, last = await self._read_events(request, job_id, last)
                if ended:
                    return
                if status in (204, 404):  # 204: ended, and the last event was read without its data
                    return await self._poll(request, job_id)
            await asyncio.sleep(0.2)
        self.faults.append(f"stream of {job_id}: no end within {GIVE_UP_S:g} s")

    async def _read_events(self, request: Request, job_id: str, last: str) -> tuple[int, bool, str]:
        """Read a stream to its end; return its status, whether it showed the job's end, and the last event's id."""
        assert self._session is not None
        headers, ended = {"Last-Event-ID": last} if last else {}, False
        async with self._session.get(f"/v1/jobs/{job_id}/events", headers=headers) as response:
            async for raw in response.content:
                line = raw.decode().rstrip()
                last = line[4:] if line.startswith("id: ") else last
                if line.startswith("data: "):
                    if ended:
                        request.contradiction = f"{job_id}: {line} after its end"
                    ended = request.note_end(json.loads(line[6:])) or ended
            return response.status, ended, last


def _line(request: Request, together: tuple[Request, ...]) -> bytes:
    return json.dumps(request.body(together) | {"key": request.planned.token}).encode() + b"\n"
