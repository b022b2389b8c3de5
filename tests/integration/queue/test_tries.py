"""Requests that wait for the job of an earlier try: which one a retry finds, and when a job is abandoned."""

from __future__ import annotations

from shared.queue import Queue

WHOSE = ("acme", "d" * 40)


async def test_a_retry_finds_the_job_of_its_try(queue: Queue) -> None:
    await queue.sync_calls.start(*WHOSE, "job_a")
    assert await queue.sync_calls.join(*WHOSE) == "job_a"
    assert await queue.sync_calls.join("other", WHOSE[1]) is None
    assert await queue.sync_calls.join(WHOSE[0], "e" * 40) is None


async def test_a_delivered_answer_is_found_no_more(queue: Queue) -> None:
    await queue.sync_calls.start(*WHOSE, "job_a")
    await queue.sync_calls.delivered(*WHOSE, "job_a")
    assert await queue.sync_calls.join(*WHOSE) is None
    assert await queue.sync_calls.leave(*WHOSE, "job_a") is None


async def test_retries_of_equal_requests_share_their_jobs_out(queue: Queue) -> None:
    """First the one that a request has left; never two retries on one job while another has none."""
    for job in ("job_a", "job_b", "job_c"):
        await queue.sync_calls.start(*WHOSE, job)
    await queue.sync_calls.leave(*WHOSE, "job_b")
    assert [await queue.sync_calls.join(*WHOSE) for _ in range(3)] == ["job_b", "job_a", "job_c"]


async def test_a_job_is_abandoned_once_nobody_came_for_it(queue: Queue) -> None:
    await queue.sync_calls.start(*WHOSE, "job_a")
    left = await queue.sync_calls.leave(*WHOSE, "job_a")
    assert left is not None
    assert await queue.sync_calls.abandon(*WHOSE, "job_a", left)
    assert not await queue.sync_calls.abandon(*WHOSE, "job_a", left)
    assert await queue.sync_calls.join(*WHOSE) is None


async def test_a_job_is_kept_while_a_retry_waits_and_for_a_new_time_after_it_left(queue: Queue) -> None:
    await queue.sync_calls.start(*WHOSE, "job_a")
    first = await queue.sync_calls.leave(*WHOSE, "job_a")
    assert await queue.sync_calls.join(*WHOSE) == "job_a"
    assert first is not None
    assert not await queue.sync_calls.abandon(*WHOSE, "job_a", first)
    second = await queue.sync_calls.leave(*WHOSE, "job_a")
    assert second is not None
    assert not await queue.sync_calls.abandon(*WHOSE, "job_a", first)
    assert await queue.sync_calls.abandon(*WHOSE, "job_a", second)


async def test_a_request_that_left_while_another_waits_leaves_the_job_to_it(queue: Queue) -> None:
    """The first try's connection may be known to be cut only after its retry has come."""
    await queue.sync_calls.start(*WHOSE, "job_a")
    await queue.sync_calls.join(*WHOSE)
    left = await queue.sync_calls.leave(*WHOSE, "job_a")
    assert left is not None
    assert not await queue.sync_calls.abandon(*WHOSE, "job_a", left)
