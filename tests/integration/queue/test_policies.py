"""Policies: processes with different settings follow the same values, and say where theirs differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from harness.queue import claim, end, put
from structlog.testing import capture_logs

from shared.queue import Queue, Submission
from shared.queue.policies import LIVE_MS, PolicySource

Make = Callable[..., Submission]
DAY_S, HOUR_S = 86_400, 3_600


async def kept_s(queue: Queue, make_submission: Make) -> float:
    """Return for how long a job is kept that this queue's process ends."""
    (job_id,) = await put(queue, make_submission())
    (one,) = await claim(queue, 1)
    await end(queue, one)
    return round(await queue.client.redis.pttl(queue.client.redis_keys.job(job_id)) / 1000, -1)


async def forget_processes(queue: Queue) -> None:
    """Let the announcements expire, as those of processes that have ended do."""
    redis, key = queue.client.redis, queue.client.redis_keys.policy_sources
    for source, times in (await redis.hgetall(key)).items():
        started, seen = map(int, times.split())
        await redis.hset(key, source, f"{started - LIVE_MS - 1} {seen - LIVE_MS - 1}")


@pytest.fixture
def processes(queue_with: Callable[..., Queue]) -> Callable[..., Queue]:
    """Return queues of processes in one namespace, by what each has set."""
    names = {"namespace": queue_with().client.settings.namespace}

    def process(**changes: Any) -> Queue:
        return queue_with(**names, **changes)

    return process


async def test_what_one_process_sets_applies_to_all(processes: Callable[..., Queue], make_submission: Make) -> None:
    """A worker whose operator has set the retention only for the API keeps jobs as long as the API says."""
    api, worker = processes(retention_s=HOUR_S), processes()
    assert await kept_s(worker, make_submission) == DAY_S, "nothing is announced"
    await api.policies.announce("api", starts=True)
    await worker.policies.announce("worker", starts=True)
    assert [await kept_s(queue, make_submission) for queue in (api, worker)] == [HOUR_S, HOUR_S]
    assert [queue.policies.value("retention_s") for queue in (api, worker)] == [HOUR_S, HOUR_S]
    assert not worker.policies.conflicts


async def test_a_conflict_is_logged_by_every_process_until_all_have_one_value(
    processes: Callable[..., Queue], make_submission: Make
) -> None:
    """The process that started last decides: a rolling restart brings a new value without further steps."""
    old_api, old_worker = processes(retention_s=HOUR_S), processes(retention_s=HOUR_S)
    await old_api.policies.announce("api", starts=True)
    await old_worker.policies.announce("worker", starts=True)
    new_api = processes(retention_s=2 * HOUR_S)
    with capture_logs() as logs:
        await new_api.policies.announce("api", starts=True)
        for _ in range(2):
            await old_worker.policies.announce("worker")
    messages = [line["message"] for line in logs if line["event"] == "policies_differ"]
    assert len(messages) == 2, "each process logs a conflict once"
    assert "FUSEQUEUE_RETENTION_S differs between processes: 7200 (api) applies, not 3600 (api, worker)" in messages[1]
    assert await kept_s(old_worker, make_submission) == 2 * HOUR_S
    await forget_processes(old_api)
    new_worker = processes(retention_s=2 * HOUR_S)
    await new_worker.policies.announce("worker", starts=True)
    assert not new_worker.policies.conflicts
    assert await kept_s(new_worker, make_submission) == 2 * HOUR_S


async def test_a_value_that_no_process_sets_any_more_ends(processes: Callable[..., Queue]) -> None:
    """Two minutes after the last process with it, the default applies again."""
    before, after = processes(max_attempts=9), processes()
    await before.policies.announce("api", starts=True)
    await after.policies.announce("api", starts=True)
    assert after.policies.value("max_attempts") == 9
    await forget_processes(before)
    await after.policies.announce("api")
    assert after.policies.value("max_attempts") == 3
    assert [source.role for source in await after.policies.load()] == ["api"]


async def test_processes_with_equal_settings_are_one_source(processes: Callable[..., Queue]) -> None:
    """A thousand workers take one row."""
    for _ in range(3):
        await processes().policies.announce("worker", starts=True)
    reader = processes()
    assert len(await reader.policies.load()) == 1
    assert await reader.client.redis.pttl(reader.client.redis_keys.policy_sources) <= LIVE_MS
    assert PolicySource.of("worker", reader.client.settings) in await reader.policies.load()
