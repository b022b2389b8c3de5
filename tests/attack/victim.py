"""The other tenant: what it does is repeated and timed while an attack runs."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import secrets
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
from harness.webhook_receiver import WebhookReceiver
from PIL import Image

from attack.stack import Keys

BOUNDS_S = {"submit": 5.0, "read": 5.0, "upload": 10.0, "url": 10.0, "job": 15.0, "webhook": 20.0, "batch": 40.0}
"""What another tenant waits at most, on two cores that the attacker's own process shares."""

GIVE_UP_S = 60.0
POLL_S = 0.1
PAUSE_S = 0.1
BATCH_LINES = 3
MAX_RETRY_AFTER_S = 2.0
_RETRIED = frozenset((429, 503))
JOB = {"model": "alpha", "prompt": "of the other tenant"}


class Refused(Exception):
    """A response that a client does not retry."""


class Victim:
    """A client that retries what is refused for a while, as clients do; a retry counts as time."""

    def __init__(self, url: str, keys: Keys, receiver: WebhookReceiver) -> None:
        self._url, self._headers, self._receiver = url, keys.headers, receiver
        self._hook = f"http://localhost:{receiver.port}/hook"  # a name, which is resolved each time
        self._endpoint = ""
        self.worst: dict[str, float] = defaultdict(float)
        self.faults: list[str] = []

    async def run(self, seconds: float) -> None:
        """Do everything at least once and for at least `seconds`; `worst` has the longest time of each."""
        async with asyncio.TaskGroup() as tasks:
            for name in BOUNDS_S:
                tasks.create_task(self._repeat(name, seconds))

    async def _repeat(self, name: str, seconds: float) -> None:
        work: Callable[[], Awaitable[None]] = getattr(self, f"_do_{name}")
        until = time.monotonic() + seconds
        while True:
            started = time.monotonic()
            try:
                async with asyncio.timeout(GIVE_UP_S):
                    await work()
            except TimeoutError:
                self.faults.append(f"{name}: not within {GIVE_UP_S:g} s")
            except Refused as error:
                self.faults.append(f"{name}: {error}")
            self.worst[name] = max(self.worst[name], time.monotonic() - started)
            if self.faults or time.monotonic() > until:
                return
            await asyncio.sleep(PAUSE_S)

    async def _send(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        """Send a request on a connection of its own, until it is accepted."""
        while True:
            wait_s = 0.2
            with contextlib.suppress(httpx.TransportError):
                async with httpx.AsyncClient(base_url=self._url, timeout=GIVE_UP_S, trust_env=False) as client:
                    response = await client.request(method, path, headers=self._headers, **options)
                if response.is_success:
                    return dict(response.json())
                if response.status_code not in _RETRIED:
                    raise Refused(f"{response.status_code} {response.text[:200]}")
                wait_s = min(float(response.headers.get("retry-after", 1)), MAX_RETRY_AFTER_S)
            await asyncio.sleep(wait_s)

    async def _do_submit(self) -> None:
        await self._send("POST", "/v1/jobs", json=JOB)

    async def _do_read(self) -> None:
        await self._send("GET", "/v1/jobs?limit=5")

    async def _do_upload(self) -> None:
        file = io.BytesIO()
        Image.frombytes("RGB", (32, 32), secrets.token_bytes(3072)).save(file, "PNG")
        await self._send("POST", "/v1/inputs", files={"file": ("a.png", file.getvalue(), "image/png")})

    async def _do_url(self) -> None:
        """Let the API resolve a name: change the URL of an endpoint that gets no events."""
        if not self._endpoint:
            body = {"url": self._hook, "events": ["video.failed"]}
            self._endpoint = (await self._send("POST", "/v1/webhooks", json=body))["id"]
        await self._send("PATCH", f"/v1/webhooks/{self._endpoint}", json={"url": self._hook})

    async def _do_job(self) -> None:
        """From the submit of a job of priority `standard` to its end."""
        job = await self._send("POST", "/v1/jobs", json=JOB)
        while job["status"] not in ("succeeded", "failed"):
            await asyncio.sleep(POLL_S)
            job = await self._send("GET", f"/v1/jobs/{job['id']}")

    async def _do_webhook(self) -> None:
        """From the submit of a job to its webhook."""
        job = await self._send("POST", "/v1/jobs", json={**JOB, "webhook": self._hook})
        while not any(job["id"] in content for _, content in list(self._receiver.received)):
            await asyncio.sleep(POLL_S)

    async def _do_batch(self) -> None:
        """From the upload of a batch's file to the batch's end."""
        lines = [
            {"custom_id": str(number), "method": "POST", "url": "/v1/jobs", "body": JOB}
            for number in range(BATCH_LINES)
        ]
        upload = {"file": ("a.jsonl", "\n".join(map(json.dumps, lines)).encode(), "application/jsonl")}
        file = await self._send("POST", "/v1/files", files=upload, data={"purpose": "batch"})
        batch = await self._send("POST", "/v1/batches", json={"input_file_id": file["id"], "endpoint": "/v1/jobs"})
        while batch["status"] not in ("completed", "failed", "expired", "cancelled"):
            await asyncio.sleep(POLL_S)
            batch = await self._send("GET", f"/v1/batches/{batch['id']}")
        if batch["request_counts"]["completed"] != BATCH_LINES:
            raise Refused(f"the batch ended as {batch['status']}: {batch['request_counts']}")
