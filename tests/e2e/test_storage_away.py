"""The whole stack on S3, and what happens while the bucket is away."""

from __future__ import annotations

from typing import Any

import httpx
import redis
from harness.waiting import wait_until

from shared.queue.redis_keys import RedisKeys

PROMPT = "a blue square on a white ground, top"


def leases(stack: Any, ids: list[str]) -> list[float]:
    """Return until when the jobs' leases last, by the clock of Redis (ms); 0 of a job that is in nobody's hands."""
    with redis.Redis(port=stack.redis_port) as client:
        return [client.zscore(RedisKeys("default").leases, name) or 0.0 for name in ids]


def test_finished_pictures_wait_for_storage(make_stack: Any) -> None:
    """While S3 is down jobs stay `uploading` and workers live; when it is back each ends, made once."""
    stack = make_stack()
    s3 = stack.s3()
    stack.start(workers=1)
    first = stack.finish(stack.submit(prompt=PROMPT, steps=2, seed=1))
    assert first["status"] == "succeeded", first["error"]
    s3.kill()
    ids = [stack.submit(prompt=PROMPT, steps=2, seed=seed) for seed in range(4)]
    wait_until(lambda: all(stack.job(name)["phase"] == "uploading" for name in ids), "the pictures wait for storage")
    held = leases(stack, ids)
    wait_until(lambda: min(leases(stack, ids)) > max(held) + 3_000, "the leases are kept while storage is away")
    assert stack.client.get("/readyz").status_code == 503
    s3.revive()
    jobs = [stack.finish(name) for name in ids]
    assert [(job["status"], job["attempts"]) for job in jobs] == [("succeeded", 1)] * 4


def test_a_presigned_url_leads_to_the_picture(make_stack: Any) -> None:
    """Asked for, the API redirects to storage, and what is there is what it serves itself."""
    stack = make_stack()
    stack.s3()
    stack.start(workers=1)
    job = stack.finish(stack.submit(prompt=PROMPT, steps=2, seed=1))
    path = f"/v1/jobs/{job['id']}/artifacts/0"
    served = stack.client.get(path)
    redirect = stack.client.get(path, params={"redirect": "true"}, follow_redirects=False)
    assert redirect.status_code == 307
    assert httpx.get(redirect.headers["location"], timeout=60).content == served.content
    assert served.headers["content-type"] == "image/png"
