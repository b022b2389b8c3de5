"""Two wire versions in one queue, as in a rolling upgrade; the newer program is played by a queue that reads both."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

from harness.engine import a_job, a_spec
from harness.queue import claim, end, put

from shared.config.models_file import Catalog
from shared.job import NEWEST_JOB, Job, State, decode
from shared.queue import Queue, Submission
from shared.queue.claims import Claims
from shared.queue.scripts import ClaimRow
from shared.signature import signature
from shared.storage import connect
from worker.engine.engine import Engine
from worker.worker import Worker

NEXT = NEWEST_JOB + 1


class NextClaims(Claims):
    """Reads the next version, of which the prompt has another name, beside those there are."""

    async def _decoded(self, worker: str, row: ClaimRow) -> Job | None:
        wire = json.loads(row[1])
        if wire.get("schema_version") == NEXT:
            wire |= {"schema_version": 1, "prompt": wire.pop("text")}
        return decode(json.dumps(wire))


async def make_newer(queue: Queue, job_id: str) -> None:
    """Rewrite a job as the next version's API would have put it in line."""
    key = queue.client.redis_keys.job(job_id)
    wire = json.loads(await queue.client.redis.hget(key, "job"))
    wire |= {"schema_version": NEXT, "text": wire.pop("prompt")}
    await queue.client.redis.hset(key, "job", json.dumps(wire))


async def test_each_version_does_the_jobs_it_can_read(queue: Queue, make_submission: Callable[..., Submission]) -> None:
    """The older one gives the newer job back unharmed; the newer one does both."""
    newer, older, other = await put(queue, make_submission(), make_submission(), make_submission(prompt="a blue cross"))
    await make_newer(queue, newer)
    following = Queue.connect(queue.client.settings)
    following.claims = NextClaims(following.client)
    taken = await claim(queue, 2, "old")
    assert [one.job.id for one in taken] == [older]
    assert queue.claims.outdated
    fields = await queue.client.redis.hgetall(queue.client.redis_keys.job(newer))
    assert (fields["state"], fields.get("losses", "0")) == ("queued", "0")
    assert await queue.dead_letters.page() == ([], None)
    rest = await claim(following, 8, "new")
    assert {one.job.id for one in rest} == {newer, other}
    assert not following.claims.outdated
    assert not any(one.solo for one in rest), "given back is not lost: it may have company"
    assert all([await end(queue, one, "old") for one in taken] + [await end(following, one, "new") for one in rest])
    await following.close()


async def test_an_older_worker_leaves_and_keeps_what_it_has(queue: Queue, tiny_models: Path, tmp_path: Path) -> None:
    """It finishes its own job, and the newer one waits for a worker that can read it."""
    settings = queue.client.settings.model_copy(
        update={"storage_dir": tmp_path, "device": "cpu", "torch_threads": 1, "drain_timeout_s": 60.0}
    )
    jobs = [a_job("own"), a_job("newer")]
    await put(queue, *(Submission(job, signature(job), 0, 2) for job in jobs))
    await make_newer(queue, "newer")
    storage = connect(settings)
    async with asyncio.timeout(100):
        models = Catalog((a_spec(tiny_models / "sd", max_batch=2),))
        status = await Worker(models, queue, storage, settings, Engine).run()
    await storage.close()
    assert status == 0
    own = await queue.jobs.get("own")
    assert own is not None
    assert own.state is State.SUCCEEDED
    assert await queue.client.redis.hget(queue.client.redis_keys.job("newer"), "state") == "queued"
