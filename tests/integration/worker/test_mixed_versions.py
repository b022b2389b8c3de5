"""Two wire versions in one queue, as in a rolling upgrade; a queue that reads both stands for the newer version."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from harness.engine import a_job, a_spec
from harness.queue import claim, end, put
from structlog.testing import capture_logs

from shared.config.catalog import Catalog
from shared.job import JOB_FORM, Job, State, decode
from shared.queue import Queue, Submission
from shared.queue import claims as queue_claims
from shared.signature import signature
from shared.storage import connect
from worker.engine.engine import Engine
from worker.worker import Worker

NEXT = JOB_FORM + 1


def decode_next(wire: str | bytes) -> Job:
    """Also read the next version, in which the prompt has another name or there is a field that the job uses."""
    fields = json.loads(wire)
    fields.pop("sharpness", None)
    if fields.get("schema_version") == NEXT:
        fields |= {"schema_version": JOB_FORM, "prompt": fields.pop("text")}
    return decode(json.dumps(fields))


def in_next_form(wire: dict[str, Any]) -> dict[str, Any]:
    return wire | {"schema_version": NEXT, "text": wire.pop("prompt")}


def with_a_new_field(wire: dict[str, Any]) -> dict[str, Any]:
    return wire | {"sharpness": 0.5}


Rewrite: TypeAlias = Callable[[dict[str, Any]], dict[str, Any]]


async def make_next_version(queue: Queue, job_id: str, rewrite: Rewrite = in_next_form) -> None:
    """Rewrite a queued job as the API of the next version would."""
    key = queue.client.redis_keys.job(job_id)
    wire = json.loads(await queue.client.redis.hget(key, "job"))
    await queue.client.redis.hset(key, "job", json.dumps(rewrite(wire)))


@pytest.mark.parametrize("rewrite", [in_next_form, with_a_new_field])
async def test_each_version_runs_the_jobs_it_can_read(
    queue: Queue, make_submission: Callable[..., Submission], monkeypatch: pytest.MonkeyPatch, rewrite: Rewrite
) -> None:
    """The older version releases the newer job unchanged; the newer version runs both."""
    newer, older, other = await put(queue, make_submission(), make_submission(), make_submission(prompt="a blue cross"))
    await make_next_version(queue, newer, rewrite)
    next_queue = Queue.connect(queue.client.settings)
    with capture_logs() as logs:
        old_claims = await claim(queue, 2, "old")
    assert [each.job.id for each in old_claims] == [older]
    assert queue.claims.outdated
    (line,) = (line for line in logs if line["event"] == "job_of_newer_version")
    assert f"fusequeue cancel {newer}" in line["remedy"], "it would drain every older worker"
    fields = await queue.client.redis.hgetall(queue.client.redis_keys.job(newer))
    assert (fields["state"], fields.get("losses", "0"), fields["attempts"]) == ("queued", "0", "0")
    assert await queue.dead_letters.page() == ([], None)
    with monkeypatch.context() as patch:
        patch.setattr(queue_claims, "decode", decode_next)
        new_claims = await claim(next_queue, 8, "new")
    assert {each.job.id for each in new_claims} == {newer, other}
    assert not next_queue.claims.outdated
    assert not any(each.must_run_solo for each in new_claims), (
        "a released job is not a lost one: it can have batch mates"
    )
    settled = [await end(queue, each, "old") for each in old_claims]
    assert all(settled + [await end(next_queue, each, "new") for each in new_claims])
    await next_queue.close()


async def test_older_worker_finishes_its_jobs_and_exits(queue: Queue, tiny_models: Path, tmp_path: Path) -> None:
    """The newer job waits for a worker that can read it."""
    settings = queue.client.settings.model_copy(
        update={"storage_dir": tmp_path, "device": "cpu", "torch_threads": 1, "drain_timeout_s": 60.0}
    )
    jobs = [a_job("older"), a_job("newer")]
    await put(queue, *(Submission(job, signature(job), 0, 2) for job in jobs))
    await make_next_version(queue, "newer")
    storage = connect(settings)
    async with asyncio.timeout(100):
        models = Catalog((a_spec(tiny_models / "sd", max_batch=2),))
        status = await Worker(models, queue, storage, settings, Engine).run()
    await storage.close()
    assert status == 0
    older = await queue.jobs.get("older")
    assert older is not None
    assert older.state is State.SUCCEEDED
    assert await queue.client.redis.hget(queue.client.redis_keys.job("newer"), "state") == "queued"
