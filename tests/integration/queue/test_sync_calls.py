"""Synchronous calls in Redis: which job a retry joins, and when a job is abandoned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from harness.queue import put

from shared.queue import Queue, Submission

CALL = ("acme", "d" * 40)


async def test_a_retry_joins_the_job_of_its_earlier_attempt(queue: Queue) -> None:
    await queue.sync_calls.start(*CALL, "job_a")
    assert await queue.sync_calls.join(*CALL) == "job_a"
    assert await queue.sync_calls.join("other", CALL[1]) is None
    assert await queue.sync_calls.join(CALL[0], "e" * 40) is None


async def test_a_retry_finds_the_job_from_the_moment_it_is_queued(
    queue: Queue, make_submission: Callable[..., Submission]
) -> None:
    """One script does both: a call that is killed after it leaves no job that a retry would make again."""
    submission = replace(make_submission(tenant=CALL[0]), sync_call=CALL[1])
    for _ in range(2):  # sent again after a lost reply
        await put(queue, submission)
    assert await queue.sync_calls.join(*CALL) == submission.job.id
    await queue.sync_calls.delivered(*CALL, submission.job.id)
    assert await queue.sync_calls.join(*CALL) is None


async def test_a_job_cannot_be_joined_after_its_response_was_delivered(queue: Queue) -> None:
    await queue.sync_calls.start(*CALL, "job_a")
    await queue.sync_calls.delivered(*CALL, "job_a")
    assert await queue.sync_calls.join(*CALL) is None
    assert await queue.sync_calls.leave(*CALL, "job_a") is None


async def test_retries_of_equal_requests_join_different_jobs(queue: Queue) -> None:
    """First the job that a request has left; never two retries on one job while another job has none."""
    for job in ("job_a", "job_b", "job_c"):
        await queue.sync_calls.start(*CALL, job)
    await queue.sync_calls.leave(*CALL, "job_b")
    assert [await queue.sync_calls.join(*CALL) for _ in range(3)] == ["job_b", "job_a", "job_c"]


async def test_a_job_is_abandoned_when_no_request_has_joined_it(queue: Queue) -> None:
    await queue.sync_calls.start(*CALL, "job_a")
    score = await queue.sync_calls.leave(*CALL, "job_a")
    assert score is not None
    assert await queue.sync_calls.abandon(*CALL, "job_a", score)
    assert not await queue.sync_calls.abandon(*CALL, "job_a", score)
    assert await queue.sync_calls.join(*CALL) is None


async def test_a_joined_job_is_abandoned_only_after_its_retry_has_left(queue: Queue) -> None:
    """The grace period starts again with the retry's disconnect."""
    await queue.sync_calls.start(*CALL, "job_a")
    first = await queue.sync_calls.leave(*CALL, "job_a")
    assert await queue.sync_calls.join(*CALL) == "job_a"
    assert first is not None
    assert not await queue.sync_calls.abandon(*CALL, "job_a", first)
    second = await queue.sync_calls.leave(*CALL, "job_a")
    assert second is not None
    assert not await queue.sync_calls.abandon(*CALL, "job_a", first)
    assert await queue.sync_calls.abandon(*CALL, "job_a", second)


async def test_a_job_is_not_abandoned_while_another_request_waits(queue: Queue) -> None:
    """The disconnect of the first attempt can be noticed after its retry has joined."""
    await queue.sync_calls.start(*CALL, "job_a")
    await queue.sync_calls.join(*CALL)
    score = await queue.sync_calls.leave(*CALL, "job_a")
    assert score is not None
    assert not await queue.sync_calls.abandon(*CALL, "job_a", score)


@pytest.mark.parametrize("retries", [0, 1, 2])
async def test_a_job_is_abandoned_after_a_leave_that_was_sent_twice(queue: Queue, retries: int) -> None:
    """Each attempt leaves before the next one joins."""
    await queue.sync_calls.start(*CALL, "job_a")
    for _ in range(retries):
        await queue.sync_calls.leave(*CALL, "job_a")
        assert await queue.sync_calls.join(*CALL) == "job_a"
    await queue.sync_calls.leave(*CALL, "job_a")
    score = await queue.sync_calls.leave(*CALL, "job_a")
    assert score is not None
    assert await queue.sync_calls.abandon(*CALL, "job_a", score)


async def test_a_retry_keeps_a_job_after_a_leave_that_was_sent_twice(queue: Queue) -> None:
    await queue.sync_calls.start(*CALL, "job_a")
    await queue.sync_calls.leave(*CALL, "job_a")
    first = await queue.sync_calls.leave(*CALL, "job_a")
    assert await queue.sync_calls.join(*CALL) == "job_a"
    assert first is not None
    assert not await queue.sync_calls.abandon(*CALL, "job_a", first)
    second = await queue.sync_calls.leave(*CALL, "job_a")
    assert second is not None
    assert await queue.sync_calls.abandon(*CALL, "job_a", second)
