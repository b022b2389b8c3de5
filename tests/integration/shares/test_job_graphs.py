"""The children of a job, and the jobs that are connected with one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness.queue import claim, end, end_retention, put

from shared.artifact_ref import ArtifactRef
from shared.job import InputRef
from shared.job_fields import OnParentFailure
from shared.queue import Queue, Submission, scripts
from shared.tasks import Task

Make = Callable[..., Submission]


async def children_of(queue: Queue, parent: str, tenant: str = "default") -> list[str]:
    """Return all children of a job, newest first, page by page."""
    found: list[str] = []
    cursor: str | None = None
    while True:
        records, cursor = await queue.jobs.page(tenant, parent=parent, after=cursor, limit=2)
        found += [record.job.id for record in records]
        if cursor is None:
            return found


async def graph_of(queue: Queue, job_id: str, most: int = 50) -> tuple[list[str], bool]:
    start = await queue.jobs.get(job_id)
    assert start is not None
    graph = await queue.graphs.around(start, most)
    return [record.job.id for record in graph.records], graph.has_more


async def test_the_children_of_a_job_are_listed_before_and_after_its_end(queue: Queue, make_submission: Make) -> None:
    parent, other = await put(queue, make_submission(), make_submission())
    waiting = await put(queue, *(make_submission(after=(parent, other)) for _ in range(3)), make_submission())
    assert sorted(await children_of(queue, parent)) == sorted(waiting[:3])
    for one in await claim(queue):
        await end(queue, one)
    (later,) = await put(queue, make_submission(after=(parent,), on_parent_failure=OnParentFailure.RUN))
    assert sorted(await children_of(queue, parent)) == sorted([*waiting[:3], later])
    assert sorted(await children_of(queue, other)) == sorted(waiting[:3])
    assert await children_of(queue, parent, tenant="acme") == []


@pytest.mark.parametrize("by_retention", [False, True], ids=["deleted", "expired"])
async def test_nothing_is_kept_of_the_children_of_a_job_that_is_gone(
    queue: Queue, make_submission: Make, by_retention: bool
) -> None:
    """A child that is deleted before its parent is no longer listed."""
    (parent,) = await put(queue, make_submission())
    children = await put(queue, *(make_submission(after=(parent,)) for _ in range(2)))
    await queue.jobs.cancel(children[0])
    assert await queue.jobs.forget(children[0])
    assert await children_of(queue, parent) == children[1:]
    (one,) = await claim(queue)
    await end(queue, one)
    if by_retention:
        await end_retention(queue, parent)
    else:
        assert await queue.jobs.forget(parent)
    assert await children_of(queue, parent) == []
    assert await queue.client.redis.exists(queue.client.redis_keys.child_jobs("default", parent)) == 0


async def test_the_last_children_of_a_job_are_kept(queue: Queue, make_submission: Make) -> None:
    (parent,) = await put(queue, make_submission())
    index = queue.client.redis_keys.child_jobs("default", parent)
    await queue.client.redis.zadd(index, {f"job_{number}": number for number in range(scripts.MAX_CHILDREN)})
    (child,) = await put(queue, make_submission(after=(parent,)))
    assert await queue.client.redis.zcard(index) == scripts.MAX_CHILDREN
    assert await queue.client.redis.zrange(index, -1, -1) == [child]


async def test_the_graph_of_a_job_has_all_that_are_connected_with_it(queue: Queue, make_submission: Make) -> None:
    """Each once, the nearest first, from wherever it is read; also those of a parent that is deleted meanwhile."""
    first, other = await put(queue, make_submission(), make_submission())
    (second,) = await put(queue, make_submission(after=(first, other)))
    third, fourth = await put(queue, *(make_submission(after=(second,)) for _ in range(2)))
    (last,) = await put(queue, make_submission(after=(third, fourth, first)))
    (alone,) = await put(queue, make_submission())
    assert (await graph_of(queue, alone)) == ([alone], False)
    everyone = {first, other, second, third, fourth, last}
    for start in everyone:
        ids, has_more = await graph_of(queue, start)
        assert (ids[0], set(ids), len(ids), has_more) == (start, everyone, 6, False)
    ids, has_more = await graph_of(queue, other, most=2)
    assert (ids, has_more) == ([other, second], True)
    for one in await claim(queue):
        await end(queue, one)
    assert await queue.jobs.forget(first)
    ids, _ = await graph_of(queue, second)
    assert set(ids) == everyone - {first}


def copy_of(job_id: str) -> InputRef:
    return InputRef(
        id=f"in_{job_id}",
        key=f"inputs/default/in_{job_id}/1.png",
        content_type="image/png",
        bytes=1,
        width=8,
        height=8,
        copy_of=ArtifactRef(job=job_id),
    )


async def test_the_graph_of_a_job_has_the_jobs_whose_results_it_has_copied(queue: Queue, make_submission: Make) -> None:
    """They have ended, and can be deleted; then nothing notes children of them."""
    source, gone = await put(queue, make_submission(), make_submission())
    for one in await claim(queue):
        await end(queue, one)
    assert await queue.jobs.forget(gone)
    copies = tuple(copy_of(job_id) for job_id in (source, gone))
    for copy in copies:
        await queue.inputs.put("default", copy, 60)
    (child,) = await put(queue, make_submission(images=copies, task=Task.IMAGE_TO_IMAGE, strength=0.5))
    assert await children_of(queue, source) == [child]
    assert await graph_of(queue, source) == ([source, child], False)
    assert await graph_of(queue, child) == ([child, source], False)
    assert await queue.client.redis.exists(queue.client.redis_keys.child_jobs("default", gone)) == 0
    assert [one.job.id for one in await claim(queue)] == [child], "it waits for none of them"


async def test_of_many_children_the_graph_has_the_latest(queue: Queue, make_submission: Make) -> None:
    (parent,) = await put(queue, make_submission())
    children = await put(queue, *(make_submission(after=(parent,), created_at_ms=at) for at in range(1, 6)))
    assert await graph_of(queue, parent, most=4) == ([parent, *reversed(children[2:])], True)
