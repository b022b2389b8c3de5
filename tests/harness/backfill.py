"""A service for backfills: what it is asked, and what it refuses."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from cli.backfill.ledger import Ledger
from cli.backfill.pipeline import Backfill, BackfillOptions
from fusequeue import AsyncClient
from harness.canned import JOB

ARTIFACT = {"index": 0, "content_type": "image/png", "bytes": 3, "width": 64, "height": 64, "seed": 1}


class FakeService:
    """Refuses the prompts in `refused` that many times, with -1 for good; the jobs of the others have succeeded, after
    as many failures as `failing` has.

    `bodies` has the last one of each prompt, `uploads` the files that were uploaded. A file that is `odd` is refused,
    and each with the status `refused_upload`.
    Requests of a path in `limited` are refused that many times.

    An image in `unreadable` has that status; that of the prompt `flagged` is flagged. Images are sent while
    `sends_images` is set; `most_unsaved` is the largest number of jobs whose images were not sent.
    """

    def __init__(self) -> None:
        self.refused: dict[str, tuple[dict[str, Any], int]] = {}
        self.failing = Counter[str]()
        self.bodies: dict[str, dict[str, Any]] = {}
        self.uploads: list[bytes] = []
        self.odd = b"odd"
        self.refused_upload = 0
        self.unreadable: dict[str, int] = {}
        self.flagged = ""
        self.chosen: dict[str, Any] = {}
        self.limited = Counter[str]()
        self.prompts: list[str] = []
        self.jobs: dict[tuple[str, int], dict[str, Any]] = {}
        self.sends_images = asyncio.Event()
        self.sends_images.set()
        self.sent = self.most_unsaved = 0

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if self.limited[request.url.path] > 0:
            self.limited[request.url.path] -= 1
            detail = {"detail": "too many requests", "code": "rate_limited"}
            return httpx.Response(429, json=detail, headers={"Retry-After": "0"})
        if request.url.path == "/v1/jobs:bulk":
            key = request.headers["Idempotency-Key"]
            rows = [self._submit(key, at, line) for at, line in enumerate(request.content.splitlines(), 1) if line]
            self.most_unsaved = max(self.most_unsaved, len(self.jobs) - self.sent)
            return httpx.Response(200, content="\n".join(map(json.dumps, rows)))
        if request.url.path == "/v1/jobs":
            return httpx.Response(200, json={"data": [*self.jobs.values()][::-1]})
        if request.url.path == "/v1/inputs":
            return self._upload(request.content.partition(b"\r\n\r\n")[2].rpartition(b"\r\n--")[0])
        prompt = request.url.path.rpartition("/")[2]
        if prompt in self.unreadable:
            return httpx.Response(self.unreadable[prompt], json={"detail": "gone", "code": "not_found"})
        await self.sends_images.wait()
        self.sent += 1
        return httpx.Response(200, content=b"png")

    def _upload(self, content: bytes) -> httpx.Response:
        if self.refused_upload:
            return httpx.Response(self.refused_upload, json={"detail": "no", "code": "permission_denied"})
        self.uploads.append(content)
        if content == self.odd:
            error = {"detail": "file: a fault", "code": "invalid_input_image", "error": {"param": "file"}}
            return httpx.Response(422, json=error)
        return httpx.Response(201, json={"id": input_id(content)})

    def _submit(self, key: str, at: int, line: bytes) -> dict[str, Any]:
        body = json.loads(line)
        prompt = body["prompt"]
        self.bodies[prompt] = body
        self.prompts.append(prompt)
        error, times = self.refused.get(prompt, ({}, 0))
        if times < 0:
            return {"line": at, "error": {**error, "retryable": False}}
        if self.prompts.count(prompt) <= times:
            return {"line": at, "error": {**error, "retryable": True}}
        job_id = f"job_{len(self.jobs)}"
        artifact = {**ARTIFACT, "url": f"http://api.test/artifacts/{prompt}", "flagged": prompt == self.flagged}
        job = {**JOB, **self.chosen, "id": job_id, "prompt": prompt, "artifacts": [artifact]}
        if self.prompts.count(prompt) <= self.failing[prompt]:
            job |= {"status": "failed", "error": {"code": "worker_lost", "message": "lost", "retryable": True}}
        return {"line": at, "id": self.jobs.setdefault((key, at), job)["id"]}


def input_id(content: bytes) -> str:
    """Return the id of an uploaded file."""
    return f"in_{hashlib.sha256(content).hexdigest()[:32]}"


async def run(service: FakeService, ledger: Ledger, folder: Path, lines: int, **options: int) -> list[Any]:
    """Run a backfill of the prompts p0, p1, ... and return the refusals that it reports."""
    ledger.begin((number, {"prompt": f"p{number}"}) for number in range(lines))
    return await resume(service, ledger, folder, **options)


async def resume(service: FakeService, ledger: Ledger, folder: Path, **options: Any) -> list[Any]:
    """Continue a backfill, and return the refusals that it reports."""
    refusals: list[Any] = []
    client = AsyncClient("http://api.test", retries=0, transport=httpx.MockTransport(service))
    async with asyncio.timeout(30), client:
        await Backfill(client, ledger, BackfillOptions(folder, **options), refusals.append, on_jobs=lambda: None).run()
    return refusals


def rows(ledger: Ledger, folder: Path) -> dict[str, dict[str, Any]]:
    ledger.write_manifest(folder / "manifest.jsonl")
    manifest = map(json.loads, (folder / "manifest.jsonl").read_text().splitlines())
    return {row["prompt"]: row for row in manifest}
