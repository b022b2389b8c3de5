"""API and worker while Redis is at `maxmemory`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
from harness.api_process import Server
from harness.http_server import BODY
from harness.queue import state_of
from harness.stub_engine import StubFleet
from redis import Redis

from shared.job import Job, State
from shared.queue import Queue

Eventually = Callable[..., Awaitable[None]]


def test_submits_are_refused_while_redis_is_full_and_accepted_again(start: Callable[..., Server]) -> None:
    """With 503, a code of their own and Retry-After; jobs are read and canceled, the API stays ready."""
    server = start()
    with httpx.Client(base_url=server.url, timeout=20) as http, Redis.from_url(server.settings.redis_url) as redis:
        job = http.post("/v1/jobs", json=BODY).json()
        redis.config_set("maxmemory", 1)
        refused = http.post("/v1/jobs", json=BODY)
        assert (refused.status_code, refused.json()["code"]) == (503, "redis_full")
        assert int(refused.headers["retry-after"]) > 0
        assert http.get(f"/v1/jobs/{job['id']}").json()["status"] == "queued"
        assert http.get("/readyz").status_code == 200
        assert http.post(f"/v1/jobs/{job['id']}/cancel").status_code < 300
        redis.config_set("maxmemory", 0)
        assert http.post("/v1/jobs", json=BODY).status_code == 202


async def test_a_worker_works_while_redis_is_full(
    queue_with: Callable[..., Queue], make_job: Callable[..., Job], tmp_path: Path, eventually: Eventually
) -> None:
    """It starts, claims, renews over several leases, reports, settles and stays ready; nothing runs twice."""
    queue = queue_with(lease_ms=400)
    fleet, jobs = StubFleet(queue, tmp_path), [make_job(model="demo", previews=1) for _ in range(24)]
    await queue.check()  # as each process at its start: a new namespace needs memory
    await fleet.submit(*jobs)
    await queue.client.redis.config_set("maxmemory", 1)
    try:
        async with fleet.worker("demo", job_s=1.0) as (worker, engine):

            async def all_ended() -> bool:
                return [await state_of(queue, job.id) for job in jobs] == [State.SUCCEEDED] * len(jobs)

            await eventually(all_ended, "all jobs succeeded")
            assert worker.unready() is None
            assert len(engine.submitted) == len(jobs)
            assert await queue.dead_letters.count() == 0
    finally:
        await queue.client.redis.config_set("maxmemory", 0)
