"""The whole stack on S3, and an outage of S3."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import redis
from harness.waiting import wait_until

from shared.queue.redis_keys import RedisKeys

PROMPT = "a blue square on a white ground, top"


@pytest.fixture(scope="module")
def stack(make_shared_stack: Any) -> Any:
    """A stack on an S3 server, its process `s3`."""
    stack = make_shared_stack()
    stack.s3()
    return stack.start()


def leases(stack: Any, ids: list[str]) -> list[float]:
    """Return when the jobs' leases expire by the clock of Redis (ms); 0 for a job without lease."""
    with redis.Redis(port=stack.redis_port) as client:
        return [client.zscore(RedisKeys("default").leases, name) or 0.0 for name in ids]


def test_finished_images_wait_for_storage(stack: Any) -> None:
    """While S3 is down jobs stay `uploading`; when it is back they succeed at their first attempt."""
    (s3,) = [process for process in stack.processes if process.name == "s3"]
    first = stack.finish(stack.submit(prompt=PROMPT, steps=2, seed=1))
    assert first["status"] == "succeeded", first["error"]
    s3.kill()
    ids = [stack.submit(prompt=PROMPT, steps=2, seed=seed) for seed in range(4)]
    wait_until(lambda: all(stack.job(name)["phase"] == "uploading" for name in ids), "the images wait for storage")
    before = leases(stack, ids)
    wait_until(lambda: min(leases(stack, ids)) > max(before) + 1_000, "the leases are renewed during the outage")
    assert not stack.ready()
    s3.start_with_bucket()
    jobs = [stack.finish(name) for name in ids]
    assert [(job["status"], job["attempts"]) for job in jobs] == [("succeeded", 1)] * 4


def test_a_presigned_url_returns_the_image(stack: Any) -> None:
    """With `redirect` the API redirects to storage, which has the same bytes that the API returns."""
    job = stack.finish(stack.submit(prompt=PROMPT, steps=2, seed=1))
    path = f"/v1/jobs/{job['id']}/artifacts/0"
    served = stack.client.get(path)
    redirect = stack.client.get(path, params={"redirect": "true"}, follow_redirects=False)
    assert redirect.status_code == 307
    assert httpx.get(redirect.headers["location"], timeout=60).content == served.content
    assert served.headers["content-type"] == "image/png"
