"""Fixtures of the client's tests: a client of the real API, and a worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from ipaddress import ip_network
from pathlib import Path

import httpx
import pytest
from harness.http_server import WORKER, application, deliver, next_claim

from fusequeue import AsyncClient
from shared.job import State
from shared.job_record import Failure, Outcome
from shared.queue import Claim, Queue


@pytest.fixture
async def api(fake_queue: Queue, tmp_path: Path) -> AsyncIterator[AsyncClient]:
    """A client of the real API; each response arrives as a whole."""
    app = application(fake_queue, tmp_path, webhook_allow_networks=(ip_network("127.0.0.0/8"),))
    async with app.router.lifespan_context(app):
        for _ in range(50):  # fakeredis completes a blocking read that is cancelled during its connect
            await asyncio.sleep(0)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with AsyncClient("http://localhost", transport=transport) as client:
            yield client


@pytest.fixture
def next_job(fake_queue: Queue) -> Callable[[], Awaitable[Claim]]:
    """Claim the next job as a worker."""

    return partial(next_claim, fake_queue)


@pytest.fixture
def work(
    fake_queue: Queue, tmp_path: Path, next_job: Callable[[], Awaitable[Claim]]
) -> Callable[..., Awaitable[bytes]]:
    """Run the next job as a worker, and return its image; with a `failure`, it fails."""

    async def run(failure: str | None = None) -> bytes:
        claim = await next_job()
        if failure is None:
            return await deliver(fake_queue, tmp_path, claim)
        outcome = Outcome(state=State.FAILED, error=Failure(code="inference_failed", message=failure))
        assert await fake_queue.claims.settle(WORKER, claim.job.id, claim.epoch, outcome)
        return b""

    return run
