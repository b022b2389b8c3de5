"""The memory that large responses take while their clients do not read them."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.http_server import BODY, WORKER, StreamingCall, claimed, serving

from api import app
from api.http.streaming import RESPONSE_PIECES, with_first_read
from shared.job import State
from shared.job_record import Artifact, Outcome
from shared.queue import Queue
from shared.runtime import metrics
from shared.storage import CHUNK_BYTES
from shared.storage.folder import FolderStorage

Eventually = Callable[..., Awaitable[None]]

HELD = RESPONSE_PIECES * CHUNK_BYTES


class UnreadCall(StreamingCall):
    """A client that reads nothing but the first piece of a response until `reads` is set."""

    def __init__(self, api: httpx.AsyncClient, path: str) -> None:
        self.reads, self.status, self.pieces = asyncio.Event(), 0, 0
        super().__init__(api, path)

    async def _send(self, message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], httpx.Headers(message["headers"])
            return
        if self.pieces:
            await self.reads.wait()
        self.pieces += 1

    async def end(self) -> None:
        self.reads.set()
        await self.read_all()


@pytest.fixture
async def api(fake_queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of an API with memory for four large responses."""
    monkeypatch.setattr(app, "RESPONSE_BYTES", 4 * HELD)
    async with serving(fake_queue, tmp_path) as client:
        yield client


async def stored(api: httpx.AsyncClient, queue: Queue, folder: Path, size: int) -> str:
    """Return the URL of an artifact of `size` bytes."""
    job_id = (await api.post("/v1/jobs", json=BODY)).json()["id"]
    claim, key = await claimed(queue, job_id), f"jobs/{job_id}/1/0.png"
    storage = FolderStorage(folder / "storage", timeout_s=10)
    await storage.put(key, bytes(size), "image/png")
    await storage.close()
    artifact = Artifact(index=0, key=key, content_type="image/png", bytes=size, width=64, height=64, seed=7)
    outcome = Outcome(state=State.SUCCEEDED, artifacts=(artifact,))
    assert await queue.claims.settle(WORKER, job_id, claim.epoch, outcome)
    return f"/v1/jobs/{job_id}/artifacts/0"


def in_use() -> float:
    return metrics.shared_in_use.labels("response_memory")._value.get()


async def test_unread_downloads_of_a_tenant_leave_memory_for_another(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path, eventually: Eventually
) -> None:
    url = await stored(api, fake_queue, tmp_path, 8 * CHUNK_BYTES)
    unread = [UnreadCall(api, url) for _ in range(2)]
    for call in unread:
        await eventually(lambda call=call: call.pieces == 1, "the first piece is read")
    assert in_use() == 2 * HELD
    refused = await api.get(url)
    assert (refused.status_code, refused.json()["code"]) == (503, "overloaded")
    assert refused.headers["retry-after"]
    await unread[0].end()
    assert len((await api.get(url)).content) == 8 * CHUNK_BYTES
    await unread[1].end()
    assert in_use() == 0


async def test_a_small_download_counts_until_it_is_read(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path, eventually: Eventually
) -> None:
    unread = UnreadCall(api, await stored(api, fake_queue, tmp_path, 1000))
    await eventually(lambda: unread.pieces == 1, "the artifact is sent")
    assert (unread.status, in_use()) == (200, 1000)
    await unread.end()
    assert in_use() == 0


async def test_the_first_piece_is_not_kept_while_the_others_are_sent() -> None:
    class Piece:
        pass

    async def pieces() -> AsyncIterator[Any]:
        yield Piece()
        yield Piece()

    all_pieces = await with_first_read(pieces(), param="index")
    first = weakref.ref(await anext(all_pieces))
    await anext(all_pieces)
    assert first() is None
