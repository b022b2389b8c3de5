"""Redis speaks protocol 2 with us, whatever the URL asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shared.job import State
from shared.queue import Queue
from shared.queue.client import QueueClient


async def test_a_url_that_asks_for_protocol_3_works(queue: Queue, make_submission: Callable[..., Any]) -> None:
    """Its replies have other types: hashes come as maps."""
    url = f"{queue.client.settings.redis_url}?protocol=3"
    own = queue.client.settings.model_copy(update={"redis_url": url})
    client = QueueClient.connect(own)
    other = Queue(client)
    try:
        submission = make_submission()
        await other.jobs.submit([submission])
        (claimed,) = await other.claims.claim("w1", ("demo",), 8)
        assert claimed.job == submission.job
        record = await other.jobs.get(submission.job.id)
        assert record is not None
        assert (record.state, record.job) == (State.RUNNING, submission.job)
        (depth,) = await other.workers.queue_depths()
        assert (depth.signature, depth.running_jobs) == (submission.signature, 1)
        waiting = make_submission()
        await other.jobs.submit([waiting])
        (depth,) = await other.workers.queue_depths()
        assert sum(depth.jobs.values()) == 1
        assert depth.oldest_age_ms is not None
    finally:
        await client.close()
