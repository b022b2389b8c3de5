"""A client that submits the planned jobs and remembers every acknowledgement."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from chaos.plan import PlannedJob
from shared.job import State

REQUEST_TIMEOUT_S = 20.0
GIVE_UP_S = 90.0
_RETRIED = {429, 503}


@dataclass
class Request:
    """One planned job as the client knows it."""

    planned: PlannedJob
    job_ids: set[str] = field(default_factory=set)
    parents: tuple[Request, ...] = ()
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the client sends this request no more."""
    refused_parent: str = ""
    """The job for whose failure it was refused."""
    refused: int = 0
    unanswered: int = 0
    canceled: bool = False
    """The response to a cancellation said `canceled`."""
    cancel_accepted: bool = False
    """It said `cancel_requested`, of a job that runs: the job does not succeed any more."""
    paused: list[tuple[str, float, float]] = field(default_factory=list)
    """Jobs, and from when until when they were queued and paused, as responses say (`time.time()`)."""
    seen_ends: set[str] = field(default_factory=set)
    """Terminal states that responses and streams have shown."""
    contradiction: str = ""
    forgotten: bool = False
    """Redis lost everything after this request had been sent."""

    @property
    def after(self) -> list[str]:
        """Return the jobs that it waits for, one of each parent that has a job."""
        return [min(parent.job_ids) for parent in self.parents if parent.job_ids]

    @property
    def body(self) -> dict[str, Any]:
        return {**self.planned.body, "after": self.after}

    def is_refused(self, problem: Mapping[str, Any]) -> bool:
        """Return whether a response refuses it because a parent has failed or is forgotten, and note which."""
        place = str(problem.get("param", "")).partition("after.")[2]
        if place.isdecimal():
            self.refused_parent = self.after[int(place)]
        return bool(self.refused_parent)


class Client:
    """Submits jobs at `url`; a request with a key is repeated until it is answered."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.requests: list[Request] = []
        self._by_number: dict[int, Request] = {}
        self.statuses: Counter[int] = Counter()
        self.faults: list[str] = []
        self.given_up = 0  # requests that are refused, or without a response: they could submit a second job
        self._tasks: set[asyncio.Task[None]] = set()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        self._session = aiohttp.ClientSession(self.url, timeout=timeout, connector=aiohttp.TCPConnector(limit=64))
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
        requests = [Request(one, parents=tuple(self._by_number[number] for number in one.after)) for one in jobs]
        self.requests += requests
        self._by_number |= {request.planned.number: request for request in requests}
        for parent in {id(parent): parent for request in requests for parent in request.parents}.values():
            await parent.answered.wait()
        if len(requests) > 1:
            await self._submit_bulk(requests)
        else:
            for _ in range(jobs[0].sends):
                await self._submit(requests[0])
        for request in requests:
            request.answered.set()
            self._follow(request)

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
            status, body = await self._call("POST", "/v1/jobs", json=request.body, headers=headers)
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
        body = b"".join(json.dumps(request.body).encode() + b"\n" for request in requests)
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
        elif result["error"]["status"] in _RETRIED:
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
                if not (request.forgotten and status == 404):
                    self.faults.append(f"{method} {path}: {status} {body}")
                return {}
            await asyncio.sleep(random.uniform(0.1, 0.4))
        self.faults.append(f"{method} {path}: no answer for {GIVE_UP_S:g} s")
        return {}

    async def _cancel(self, request: Request, job_id: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        body = await self._persistently(request, "POST", f"/v1/jobs/{job_id}/cancel")
        _note_end(request, body)
        request.canceled = body.get("status") == State.CANCELED
        request.cancel_accepted = body.get("status") == State.RUNNING and bool(body.get("cancel_requested"))

    async def _pause(self, request: Request, job_id: str) -> None:
        for after_s, for_s in request.planned.pauses:
            await asyncio.sleep(after_s)
            body = await self._persistently(request, "POST", f"/v1/jobs/{job_id}/pause")
            ended, since_s = _note_end(request, body), time.time()
            await asyncio.sleep(0 if ended else for_s)
            if body.get("status") == State.QUEUED and body.get("paused_at"):
                request.paused.append((job_id, since_s, time.time()))
            _note_end(request, await self._persistently(request, "POST", f"/v1/jobs/{job_id}/resume"))

    async def _poll(self, request: Request, job_id: str) -> None:
        while True:
            body = await self._persistently(request, "GET", f"/v1/jobs/{job_id}", params={"wait": "5"})
            if not body or _note_end(request, body):
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
                    ended = _note_end(request, json.loads(line[6:])) or ended
            return response.status, ended, last


def _note_end(request: Request, body: dict[str, Any]) -> bool:
    """Note the state in a response, if it is terminal; return whether it is."""
    state = body.get("status")
    if state not in set(State) or not State(state).terminal:
        return False
    request.seen_ends.add(str(state))
    return True
