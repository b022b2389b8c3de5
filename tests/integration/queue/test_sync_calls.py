"""Synchronous calls in Redis: which job a retry joins, and when a job is abandoned."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from harness.queue import put

from shared.queue import EventFeed, Queue, Submission

CALL = ("acme", "d" * 40)
Eventually = Callable[..., Awaitable[None]]


@pytest.fixture
def living(eventually: Eventually) -> Callable[[Queue], object]:
    """Run what an API process runs beside its requests, by which others see that it lives."""

    @asynccontextmanager
    async def run(queue: Queue) -> AsyncIterator[Queue]:
        channel = queue.client.redis_keys.api_process(queue.client.process)

        async def is_subscribed() -> bool:
            return bool((await queue.client.redis.pubsub_numsub(channel))[0][1])

        async with EventFeed(queue):
            await eventually(is_subscribed, "the process can be seen")
            yield queue

    return run


@pytest.fixture
async def other(queue: Queue) -> AsyncIterator[Queue]:
    """The queue in another process."""
    other = Queue.connect(queue.client.settings)
    yield other
    await other.close()


async def test_a_retry_finds_the_job_from_the_moment_it_is_queued(
    queue: Queue, other: Queue, make_submission: Callable[..., Submission]
) -> None:
    """One script does both: a call that is killed after it leaves no job that a retry would make again."""
    submission = replace(make_submission(tenant=CALL[0]), sync_call=CALL[1])
    for _ in range(2):  # sent again after a lost reply
        await put(queue, submission)
    assert await other.sync_calls.join(*CALL) == submission.job.id
    await other.sync_calls.delivered(*CALL, submission.job.id)
    assert await other.sync_calls.join(*CALL) is None


async def test_a_retry_joins_a_job_that_a_request_has_left(queue: Queue) -> None:
    await queue.sync_calls.start(*CALL, "job_a")
    await queue.sync_calls.leave(*CALL, "job_a")
    assert await queue.sync_calls.join("other", CALL[1]) is None
    assert await queue.sync_calls.join(CALL[0], "e" * 40) is None
    assert await queue.sync_calls.join(*CALL) == "job_a"
    assert await queue.sync_calls.join(*CALL) == "", "one request of this process waits for it again"


async def test_a_retry_joins_no_job_for_which_a_request_waits(
    queue: Queue, other: Queue, living: Callable[[Queue], AsyncIterator[Queue]]
) -> None:
    """Its own attempt was refused. What is sent at once, such as a file, it joins: its response is most likely lost."""
    async with living(queue):  # type: ignore[attr-defined]
        await queue.sync_calls.start(*CALL, "job_a")
        for retrying in (queue, other):
            assert await retrying.sync_calls.join(*CALL) == ""
        assert await other.sync_calls.join(*CALL, waited_for=True) == "job_a"


async def test_a_retry_joins_the_job_of_a_process_that_has_died(
    queue: Queue, other: Queue, living: Callable[[Queue], AsyncIterator[Queue]], eventually: Eventually
) -> None:
    """Another process then waits for it: the job is abandoned when that request leaves, not by the first one."""
    async with living(queue):  # type: ignore[attr-defined]
        await queue.sync_calls.start(*CALL, "job_a")
        assert await other.sync_calls.join(*CALL) == ""

    async def is_joined() -> bool:
        return await other.sync_calls.join(*CALL) == "job_a"

    await eventually(is_joined, "the job is joined")
    assert await queue.sync_calls.leave(*CALL, "job_a") is None
    score = await other.sync_calls.leave(*CALL, "job_a")
    assert score is not None
    assert await other.sync_calls.abandon(*CALL, "job_a", score)


async def test_a_job_cannot_be_joined_after_its_response_was_delivered(queue: Queue) -> None:
    await queue.sync_calls.start(*CALL, "job_a")
    await queue.sync_calls.delivered(*CALL, "job_a")
    assert await queue.sync_calls.join(*CALL, waited_for=True) is None
    assert await queue.sync_calls.leave(*CALL, "job_a") is None


async def test_retries_of_equal_requests_join_different_jobs(queue: Queue) -> None:
    """First the oldest that a request has left; then, if they may, one with the fewest retries."""
    for job in ("job_a", "job_b", "job_c"):
        await queue.sync_calls.start(*CALL, job)
    for job in ("job_c", "job_b"):
        await queue.sync_calls.leave(*CALL, job)
    assert [await queue.sync_calls.join(*CALL) for _ in range(3)] == ["job_b", "job_c", ""]
    assert await queue.sync_calls.join(*CALL, waited_for=True) == "job_a"


async def test_a_job_is_abandoned_when_no_request_has_joined_it(queue: Queue) -> None:
    await queue.sync_calls.start(*CALL, "job_a")
    score = await queue.sync_calls.leave(*CALL, "job_a")
    assert score is not None
    assert await queue.sync_calls.abandon(*CALL, "job_a", score)
    assert not await queue.sync_calls.abandon(*CALL, "job_a", score)
    assert await queue.sync_calls.join(*CALL) is None


@pytest.mark.parametrize("leaves", [1, 2])
@pytest.mark.parametrize("retries", [0, 1, 2])
async def test_a_joined_job_is_abandoned_only_after_its_last_retry_has_left(
    queue: Queue, retries: int, leaves: int
) -> None:
    """Each attempt leaves before the next one joins, and can do so twice. The grace period starts again each time."""

    async def leave() -> int:
        scores = [await queue.sync_calls.leave(*CALL, "job_a") for _ in range(leaves)]
        assert scores[-1] is not None
        return scores[-1]

    await queue.sync_calls.start(*CALL, "job_a")
    for _ in range(retries):
        earlier = await leave()
        assert await queue.sync_calls.join(*CALL) == "job_a"
        assert not await queue.sync_calls.abandon(*CALL, "job_a", earlier)
    assert await queue.sync_calls.abandon(*CALL, "job_a", await leave())
