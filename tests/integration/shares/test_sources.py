"""Jobs that start from artifacts of jobs that have not ended, and for which those are kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from harness.queue import claim, claim_ids, end, end_retention, lose, names_left, put, state_of

from shared.artifact_ref import ArtifactRef
from shared.errors import Conflict, InvalidRequest
from shared.job import InputRef, State
from shared.job_fields import OnParentFailure
from shared.queue import Queue, Submission, scripts
from shared.tasks import Task

Make = Callable[..., Submission]


@pytest.fixture
def make_child(make_submission: Make) -> Make:
    """Build a job that starts from the first artifact of another one."""

    def build(source: str, **fields: Any) -> Submission:
        image = InputRef(
            id="", key="", content_type="image/png", bytes=0, width=64, height=64, source=ArtifactRef(job=source)
        )
        return make_submission(images=(image,), task=Task.IMAGE_TO_IMAGE, strength=0.5, **fields)

    return build


async def is_kept(queue: Queue, job_id: str) -> bool:
    """Return whether a job is there after the time that it is kept for."""
    await end_retention(queue, job_id)
    return await queue.jobs.get(job_id) is not None


async def needed_by(queue: Queue, job_id: str) -> str:
    """Return the job that the refusal to delete another one names."""
    with pytest.raises(Conflict) as refusal:
        await queue.jobs.forget(job_id)
    assert await queue.jobs.get(job_id) is not None
    return str(refusal.value).split("from which job ")[1].split()[0]


async def refused_by(queue: Queue, submission: Submission) -> tuple[str | None, str]:
    (outcome,) = await queue.jobs.submit([submission])
    assert isinstance(outcome, InvalidRequest)
    return outcome.param, outcome.message


async def test_a_source_is_waited_for_and_kept_until_the_job_that_starts_from_it_has_ended(
    queue: Queue, make_submission: Make, make_child: Make
) -> None:
    (source,) = await put(queue, make_submission())
    (child,) = await put(queue, make_child(source))
    (one,) = await claim(queue)
    assert one.job.id == source
    assert await end(queue, one)
    assert await is_kept(queue, source)
    assert await queue.client.redis.ttl(queue.client.redis_keys.job(source)) == -1
    (one,) = await claim(queue)
    assert one.job.id == child
    assert one.job.images[0].source == ArtifactRef(job=source)
    assert await needed_by(queue, source) == child
    await lose(queue, child)  # its worker is killed
    await queue.maintenance.reclaim()
    assert await is_kept(queue, source)
    (one,) = await claim(queue)
    assert await end(queue, one)
    assert await queue.client.redis.ttl(queue.client.redis_keys.job(source)) > 0
    assert not await is_kept(queue, source)


@pytest.mark.parametrize("ends", ["canceled", "failed", "while it waits"])
async def test_each_end_of_a_job_releases_its_source(
    queue: Queue, make_submission: Make, make_child: Make, ends: str
) -> None:
    (source,) = await put(queue, make_submission())
    (child,) = await put(queue, make_child(source))
    if ends == "while it waits":
        await queue.jobs.cancel(child)
    (one,) = await claim(queue)
    assert await end(queue, one)
    if ends == "canceled":
        await queue.jobs.cancel(child)
    elif ends == "failed":
        (one,) = await claim(queue)
        assert await end(queue, one, state=State.FAILED)
    assert (await state_of(queue, child)).terminal
    assert not await is_kept(queue, source)
    assert not [name for name in await names_left(queue) if name.startswith("dependents")]


async def test_one_of_two_jobs_that_start_from_a_source_keeps_it(
    queue: Queue, make_submission: Make, make_child: Make
) -> None:
    (source,) = await put(queue, make_submission())
    first, second = await put(queue, make_child(source), make_child(source))
    (one,) = await claim(queue)
    await end(queue, one)
    await queue.jobs.cancel(first)
    assert await needed_by(queue, source) == second
    assert await is_kept(queue, source)
    await queue.jobs.cancel(second)
    assert not await is_kept(queue, source)


async def test_a_job_without_its_source_fails_whatever_it_is_to_do_then(
    queue: Queue, make_submission: Make, make_child: Make
) -> None:
    source, other = await put(queue, make_submission(), make_submission())
    anyway = {"on_parent_failure": OnParentFailure.RUN, "after": (other,)}
    (child,) = await put(queue, make_child(source, **anyway))
    await queue.jobs.cancel(other)
    await queue.maintenance.queue_due()
    assert await state_of(queue, child) is State.QUEUED
    await queue.jobs.cancel(source)
    await queue.maintenance.queue_due()
    record = await queue.jobs.get(child)
    assert record is not None
    assert record.error is not None
    assert (record.state, record.error.code) == (State.FAILED, "parent_failed")
    assert source in record.error.message


async def test_what_a_job_cannot_start_from_is_refused_by_the_field_that_names_it(
    queue: Queue, make_submission: Make, make_child: Make
) -> None:
    foreign, failed = await put(queue, make_submission(tenant="other"), make_submission())
    await queue.jobs.cancel(failed)
    missing = "job_" + 26 * "0"
    assert await refused_by(queue, make_child(foreign)) == ("image", "image: there is no such job")
    assert await refused_by(queue, make_child(missing)) == ("image", "image: there is no such job")
    anyway = make_child(failed, on_parent_failure=OnParentFailure.RUN, after=(failed,))
    assert await refused_by(queue, anyway) == ("image", "image: it is canceled; it has no result to start from")
    assert not [name for name in await names_left(queue) if name.startswith(("dependents", "children"))]


async def test_a_source_has_a_bounded_number_of_jobs_that_start_from_it(
    queue: Queue, make_submission: Make, make_child: Make
) -> None:
    (source,) = await put(queue, make_submission())
    (one,) = await claim(queue)
    await end(queue, one)
    others = {f"job_{number}": number for number in range(scripts.MAX_CHILDREN)}
    await queue.client.redis.zadd(queue.client.redis_keys.dependents(source), others)
    param, message = await refused_by(queue, make_child(source))
    assert param == "image"
    assert "10000 jobs" in message
    await queue.client.redis.delete(queue.client.redis_keys.dependents(source))


async def test_a_redriven_job_keeps_its_source_again(queue: Queue, make_submission: Make, make_child: Make) -> None:
    (source,) = await put(queue, make_submission())
    (child,) = await put(queue, make_child(source))
    (one,) = await claim(queue)
    await end(queue, one)
    for _ in range(queue.client.settings.max_attempts + 1):
        assert await claim_ids(queue) == [child]
        await lose(queue, child)
        await queue.maintenance.reclaim()
    assert await state_of(queue, child) is State.FAILED
    assert await queue.dead_letters.redrive(child)
    assert await needed_by(queue, source) == child
    assert await is_kept(queue, source)


async def test_what_a_failover_has_lost_of_a_source_is_repaired(
    queue: Queue, make_submission: Make, make_child: Make
) -> None:
    (source,) = await put(queue, make_submission())
    (child,) = await put(queue, make_child(source))
    (one,) = await claim(queue)
    await end(queue, one)
    redis, keys = queue.client.redis, queue.client.redis_keys
    await redis.delete(keys.dependents(source))
    await redis.expire(keys.job(source), 60)
    assert await queue.maintenance.reconcile() >= 1
    assert await queue.maintenance.reconcile() == 0
    assert await redis.ttl(keys.job(source)) == -1
    assert await is_kept(queue, source)
    await queue.jobs.cancel(child)
    await redis.zadd(keys.dependents(source), {child: 1, "job_" + 26 * "0": 1})  # a worker of an earlier version
    await redis.persist(keys.job(source))
    assert not await is_kept(queue, source)
    assert not await redis.exists(keys.dependents(source))


async def test_ended_jobs_that_are_still_listed_do_not_hide_one_that_starts_from_a_source(
    queue: Queue, make_submission: Make, make_child: Make
) -> None:
    (source,) = await put(queue, make_submission())
    (child,) = await put(queue, make_child(source))
    (one,) = await claim(queue)
    await end(queue, one)
    ended = {f"job_{number:026}": 1 for number in range(150)}  # as workers of an earlier version leave them
    await queue.client.redis.zadd(queue.client.redis_keys.dependents(source), ended)
    assert await is_kept(queue, source)
    await queue.client.redis.zadd(queue.client.redis_keys.dependents(source), ended)
    for _ in range(2):
        with pytest.raises(Conflict):
            await queue.jobs.forget(source)
    assert await needed_by(queue, source) == child


async def test_kept_sources_do_not_hide_the_jobs_that_a_sweep_deletes(
    queue: Queue, make_submission: Make, make_child: Make
) -> None:
    """Also if they are more than a sweep looks at at once."""
    sources = await put(queue, *(make_submission() for _ in range(5)))
    children = await put(queue, *(make_child(source) for source in sources))
    others = await put(queue, *(make_submission() for _ in range(3)))
    for one in await claim(queue, slots=8):
        await end(queue, one)
    rows = await queue.client.redis.zrange(queue.client.redis_keys.retention, 0, -1)
    due = {row: 1 if row.split("|")[2] in sources else 2 for row in rows}
    await queue.client.redis.zadd(queue.client.redis_keys.retention, due)
    assert {item.id for item in await queue.maintenance.expired_items(2)} < set(others)
    assert {item.id for item in await queue.maintenance.expired_items(4)} == set(others)
    for child in children:
        await queue.jobs.cancel(child)
