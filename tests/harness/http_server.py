"""The API inside a test process over a given queue, and helpers that act as the worker."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from fastapi.routing import APIRoute
from PIL import Image

from api.app import create_app
from shared.auth import Scope
from shared.job import State
from shared.job_record import Artifact, Outcome
from shared.queue import Claim, Queue
from shared.runtime.asyncio_tools import cancel_and_wait
from shared.storage import connect

ROOT = Path(__file__).resolve().parents[2]
WORKER = "worker-of-the-test"
BODY = {"model": "demo", "prompt": "a red circle on a blue ground, left"}


def application(queue: Queue, folder: Path, **settings: Any) -> FastAPI:
    """Return the API over `queue`, with its storage in `folder`."""
    overrides = {"models": ROOT / "models.toml", "storage_dir": folder / "storage", "sse_keepalive_s": 0.05, **settings}
    return create_app(queue.client.settings.model_copy(update=overrides), queue=queue)


def paths(queue: Queue, folder: Path) -> list[tuple[str, str]]:
    """Return the method and path of every route, with the names of its parameters in braces."""
    found = []
    todo = list(application(queue, folder).routes)
    while todo:
        route = todo.pop()
        todo += getattr(getattr(route, "original_router", None), "routes", [])
        if isinstance(route, APIRoute):
            found += [(method, route.path) for method in route.methods]
    return found


@contextlib.asynccontextmanager
async def serving(queue: Queue, folder: Path, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of an API without network."""
    app = application(queue, folder, **settings)
    async with app.router.lifespan_context(app):
        for _ in range(50):  # fakeredis completes a blocking read that is cancelled during its connect
            await asyncio.sleep(0)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield client


def without_window(folder: Path) -> Path:
    """Return a models file whose jobs can be claimed at once, all together."""
    text = (ROOT / "models.toml").read_text("utf-8")
    for line, changed in (("window_ms = 50", "window_ms = 0"), ('"demo/model"', f'"{ROOT / "demo/model"}"')):
        assert line in text
        text = text.replace(line, changed)
    file = folder / "models.toml"
    file.write_text(text, "utf-8")
    return file


def png(width: int = 64, height: int = 64, colour: str = "red") -> bytes:
    """Return the bytes of an image file."""
    file = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(file, "PNG")
    return file.getvalue()


@contextlib.asynccontextmanager
async def hosting(heads: Mapping[bytes, bytes] | None = None) -> AsyncIterator[str]:
    """Yield the URL of an image host: it sends an image at /fast, `heads` at their paths, then nothing more."""
    tasks: set[asyncio.Task[Any]] = set()
    image = png()
    whole = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(image) + image

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            path = (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1]
            writer.write(whole if path == b"/fast" else (heads or {}).get(path, b""))
            await writer.drain()
            if path != b"/fast":
                await asyncio.Event().wait()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def claimed(queue: Queue, job_id: str) -> Claim:
    """Claim jobs as a worker does until `job_id` is among them."""
    async with asyncio.timeout(60):
        while True:
            for claim in await queue.claims.claim(WORKER, ["demo"], 64):
                if claim.job.id == job_id:
                    return claim
            await asyncio.sleep(0.01)


async def next_claim(queue: Queue, model: str = "demo") -> Claim:
    """Claim the next job of a model as a worker."""
    async with asyncio.timeout(60):
        while True:
            for claim in await queue.claims.claim(WORKER, [model], 1):
                return claim
            await asyncio.sleep(0.01)


async def finish(queue: Queue, folder: Path, job_id: str) -> bytes:
    """Run one job as a worker and return the stored image."""
    return await deliver(queue, folder, await claimed(queue, job_id))


async def deliver(queue: Queue, folder: Path, claim: Claim, *, flagged: bool = False, **results: Any) -> bytes:
    """Store an image for a claimed job and settle it with `results`; `flagged` by the model's safety checker."""
    storage = connect(queue.client.settings.model_copy(update={"storage_dir": folder / "storage"}))
    data, key = png(), f"jobs/{claim.job.id}/{claim.epoch}/0.png"
    await storage.put(key, data, "image/png")
    await storage.close()
    about: dict[str, Any] = {"width": 64, "height": 64, "seed": claim.job.seed, "flagged": flagged}
    artifact = Artifact(index=0, key=key, content_type="image/png", bytes=len(data), **about)
    outcome = Outcome(state=State.SUCCEEDED, artifacts=(artifact,), **results)
    assert await queue.claims.settle(WORKER, claim.job.id, claim.epoch, outcome)
    return data


@contextlib.asynccontextmanager
async def working(queue: Queue, folder: Path, *models: str, **results: Any) -> AsyncIterator[None]:
    """Finish queued jobs in the background, by default those of the demo model."""

    async def work() -> None:
        while True:
            for claim in await queue.claims.claim(WORKER, models or ("demo",), 4):
                await deliver(queue, folder, claim, **results)
            await asyncio.sleep(0.01)

    worker = asyncio.create_task(work())
    yield
    await cancel_and_wait((worker,))


async def bearer(queue: Queue, tenant: str = "acme", scopes: Iterable[Scope] = Scope, **options: Any) -> dict[str, str]:
    """Create a key, and return the header of requests with it."""
    token, _ = await queue.api_keys.create(tenant, frozenset(scopes), **options)
    return {"Authorization": f"Bearer {token}"}


class StreamingCall:
    """A response that can be read while it is streamed; httpx's ASGITransport returns it only at its end."""

    def __init__(self, api: httpx.AsyncClient, path: str, headers: Mapping[str, str] | None = None) -> None:
        self.text = ""
        request = api.build_request("GET", path, headers=headers)
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "GET",
            "scheme": "http",
            "path": request.url.path,
            "raw_path": request.url.raw_path,
            "query_string": request.url.query,
            "root_path": "",
            "headers": [(name.lower(), value) for name, value in request.headers.raw],
            "client": ("127.0.0.1", 1),
            "server": ("localhost", 80),
        }
        self.headers = httpx.Headers()
        self._request_sent = False
        self._ended = asyncio.ensure_future(api._transport.app(scope, self._receive, self._send))  # type: ignore[attr-defined]

    async def _receive(self) -> dict[str, Any]:
        if self._request_sent:
            await asyncio.Event().wait()  # it never disconnects
        self._request_sent = True
        return {"type": "http.request", "body": b"", "more_body": False}

    async def _send(self, message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.headers = httpx.Headers(message["headers"])
        self.text += message.get("body", b"").decode()

    async def wait_for(self, text: str) -> None:
        """Wait until the response contains `text`."""
        async with asyncio.timeout(60):
            while text not in self.text:
                assert not self._ended.done(), f"the response ended without {text!r}: {self.text}"
                await asyncio.sleep(0.01)

    async def read_all(self) -> str:
        """Wait for the end of the response and return its text."""
        await asyncio.wait_for(self._ended, 60)
        return self.text
