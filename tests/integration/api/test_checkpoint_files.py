"""No route returns a checkpoint: neither to the tenant of the job nor to another, whatever keys they guess."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator
from urllib.parse import quote

import httpx
import pytest
from harness.api_thread import ApiThread
from harness.http_server import WORKER, next_claim

from shared.auth import Scope
from shared.queue import Queue
from shared.queue.checkpoints import JobCheckpoint, StoredImage, checkpoint_key
from shared.storage import connect

SECRET = b"the state of an image"
PARAMETER = re.compile(r"{[^}]+}")


def guesses(job_id: str, key: str) -> list[str]:
    """Return what a client can put into a path to reach a file of storage, as it is and with its slashes escaped."""
    texts = (key, f"../../{key}", key.removeprefix(f"jobs/{job_id}/"))
    return [job_id, *texts, *(quote(text, safe="") for text in texts)]


def with_values(path: str, first: str, last: str) -> str:
    """Return a path with values in place of its parameters: one for the last, one for those before it."""
    values = [first] * (path.count("{") - 1) + [last]
    return PARAMETER.sub(lambda _: values.pop(0), path)


def paths_of(served: ApiThread, job_id: str, key: str) -> Iterator[str]:
    """Yield the paths of all routes that read, with guesses in place of each parameter; and keys as paths."""
    paths = httpx.get(f"{served.url}/openapi.json").json()["paths"]
    for path in (path for path, methods in paths.items() if "get" in methods and "{" in path):
        for guess in guesses(job_id, key):
            yield with_values(path, job_id, guess)
    for start in ("", "v1/jobs/../../", "static/../", "storage/", f"v1/jobs/{job_id}/artifacts/0/../"):
        yield f"/{start}{key}"
    yield f"/v1/jobs/{job_id}/checkpoints"


@pytest.fixture
def served(serve: Callable[..., ApiThread]) -> ApiThread:
    return serve(auth="keys")


@pytest.fixture
async def queue(served: ApiThread) -> AsyncIterator[Queue]:
    queue = Queue.connect(served.settings)
    yield queue
    await queue.close()


@pytest.mark.parametrize("tenant", ["acme", "other"])
async def test_no_path_returns_a_checkpoint(served: ApiThread, queue: Queue, tenant: str) -> None:
    storage = connect(served.settings)
    keys = {name: (await queue.api_keys.create(name, frozenset(Scope)))[0] for name in ("acme", "other")}
    async with httpx.AsyncClient(base_url=served.url, headers={"Authorization": f"Bearer {keys['acme']}"}) as http:
        job_id = (await http.post("/v1/jobs", json={"model": "demo", "prompt": "a hill"})).json()["id"]
    one = await next_claim(queue)
    key = checkpoint_key(job_id, one.epoch, 1, 0)
    await storage.put(key, SECRET, "application/safetensors")
    image = StoredImage(key=key, bytes=len(SECRET), sha256="", step=1, total=2)
    assert await queue.claims.keep_checkpoint(WORKER, one, JobCheckpoint(images=(image,))) == "kept"
    paths = list(dict.fromkeys(paths_of(served, job_id, key)))
    assert len(paths) > 100
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {keys[tenant]}"}, timeout=30) as http:
        for path in paths:
            async with http.stream("GET", f"{served.url}{path}") as response:
                content = b"" if "event-stream" in response.headers.get("content-type", "") else await response.aread()
            assert SECRET not in content, path
    assert await storage.read(key, 0, 100) == SECRET
