"""Policies: processes with different settings follow the same values, and say where theirs differ."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from harness.http_server import serving
from harness.queue import claim, end, put
from structlog.testing import capture_logs

from api.background import Background
from api.chores.maintenance import _move_on
from api.chores.rq_worker import _announcing
from shared.errors import RedisUnavailable
from shared.queue import Queue, Submission, policies
from shared.queue.policies import KEPT_MS, LIVE_MS, Policies, PolicySource, Role

Make = Callable[..., Submission]
DAY_S, HOUR_S = 86_400, 3_600


async def kept_s(queue: Queue, make_submission: Make) -> float:
    """Return for how long a job is kept that this queue's process ends."""
    (job_id,) = await put(queue, make_submission())
    (one,) = await claim(queue, 1)
    await end(queue, one)
    return round(await queue.client.redis.pttl(queue.client.redis_keys.job(job_id)) / 1000, -1)


async def pass_time(queue: Queue, ms: int = LIVE_MS + 1, *, of: Iterable[PolicySource] | None = None) -> None:
    """Let the announcements of some sources be older, by default those of all."""
    redis, key = queue.client.redis, queue.client.redis_keys.policy_sources
    for text, times in (await redis.hgetall(key)).items():
        if of is None or PolicySource.parse(text) in of:
            started, seen = map(int, times.split())
            await redis.hset(key, text, f"{started - ms} {seen - ms}")


def source(queue: Queue, role: Role) -> PolicySource:
    return PolicySource.of(role, queue.client.settings)


@pytest.fixture
def processes(queue_with: Callable[..., Queue]) -> Callable[..., Queue]:
    """Return queues of processes in one namespace, by what each has set; they start a second after each other."""
    names = {"namespace": queue_with().client.settings.namespace}
    starts_s = itertools.count(time.monotonic() - HOUR_S)

    def process(**changes: Any) -> Queue:
        queue = queue_with(**names, **changes)
        queue.policies.started_s = next(starts_s)
        return queue

    return process


async def test_what_one_process_sets_applies_to_all(processes: Callable[..., Queue], make_submission: Make) -> None:
    """A worker whose operator has set the retention only for the API keeps jobs as long as the API says."""
    api, worker = processes(retention_s=HOUR_S), processes()
    assert await kept_s(worker, make_submission) == DAY_S, "nothing is announced"
    await api.policies.announce("api")
    await worker.policies.announce("worker")
    assert [await kept_s(queue, make_submission) for queue in (api, worker)] == [HOUR_S, HOUR_S]
    assert [queue.client.policy("retention_s") for queue in (api, worker)] == [HOUR_S, HOUR_S]
    assert not worker.policies.conflicts


async def test_a_conflict_is_logged_by_every_process_until_all_have_one_value(
    processes: Callable[..., Queue], make_submission: Make
) -> None:
    """The process that started last decides: a rolling restart brings a new value without further steps."""
    old_api, old_worker = processes(retention_s=HOUR_S), processes(retention_s=HOUR_S)
    await old_api.policies.announce("api")
    await old_worker.policies.announce("worker")
    new_api = processes(retention_s=2 * HOUR_S)
    with capture_logs() as logs:
        await new_api.policies.announce("api")
        for _ in range(2):
            await old_worker.policies.announce("worker")
    messages = [line["message"] for line in logs if line["event"] == "policies_differ"]
    assert len(messages) == 2, "each process logs a conflict once"
    assert "FUSEQUEUE_RETENTION_S differs between processes: 7200 (api) applies, not 3600 (api, worker)" in messages[1]
    assert await kept_s(old_worker, make_submission) == 2 * HOUR_S
    await pass_time(old_api, of=(source(old_api, "api"), source(old_worker, "worker")))
    new_worker = processes(retention_s=2 * HOUR_S)
    await new_worker.policies.announce("worker")
    assert not new_worker.policies.conflicts
    assert await kept_s(new_worker, make_submission) == 2 * HOUR_S


async def test_a_value_that_no_process_sets_any_more_ends(processes: Callable[..., Queue]) -> None:
    """Two minutes after the last process with it, the default applies again."""
    before, after = processes(max_attempts=9), processes()
    await before.policies.announce("api")
    await after.policies.announce("api")
    assert after.client.policy("max_attempts") == 9
    await pass_time(before, of=(source(before, "api"),))
    await after.policies.announce("api")
    assert after.client.policy("max_attempts") == 3
    assert [source.role for source in await after.policies.load()] == ["api"]


async def test_processes_with_equal_settings_are_one_source(processes: Callable[..., Queue]) -> None:
    """A thousand workers take one row."""
    for _ in range(3):
        await processes().policies.announce("worker")
    reader = processes()
    assert len(await reader.policies.load()) == 1
    assert await reader.client.redis.pttl(reader.client.redis_keys.policy_sources) <= KEPT_MS
    assert PolicySource.of("worker", reader.client.settings) in await reader.policies.load()


async def test_an_outage_ends_no_value(processes: Callable[..., Queue]) -> None:
    """A worker without settings that announces first does not bring back the defaults."""
    api, worker = processes(max_attempts=9), processes()
    await api.policies.announce("api")
    await worker.policies.announce("worker")
    await pass_time(api, 3 * LIVE_MS)
    for _ in range(2):
        await worker.policies.announce("worker")
    assert worker.client.policy("max_attempts") == 9
    await pass_time(api, of=(source(api, "api"),))
    await worker.policies.announce("worker")
    assert worker.client.policy("max_attempts") == 3, "its process has not returned after the outage"


async def test_the_process_that_started_last_decides_after_a_loss_of_data(processes: Callable[..., Queue]) -> None:
    """Also when the older one announces after it."""
    older, newer = processes(max_attempts=7), processes(max_attempts=9)
    for queue in (newer, older):
        await queue.policies.announce("api")
    assert older.client.policy("max_attempts") == 9


async def test_announcements_of_a_newer_version_are_read(processes: Callable[..., Queue]) -> None:
    """It can have other fields, other policies and further times."""
    queue = processes()
    redis, keys, now_ms = queue.client.redis, queue.client.redis_keys, await queue.now_ms()
    text = json.dumps({"role": "api", "set": {"max_attempts": "9", "later": "1"}, "version": "2"})
    await redis.hset(keys.policy_sources, text, f"{now_ms} {now_ms} {now_ms}")
    await queue.policies.announce("worker")
    assert queue.client.policy("max_attempts") == 9
    assert sorted(one.role for one in await queue.policies.load()) == ["api", "worker"]


@pytest.mark.parametrize("error", [RedisUnavailable("away"), KeyError("unexpected")])
async def test_announcements_go_on_after_an_error(
    processes: Callable[..., Queue],
    monkeypatch: pytest.MonkeyPatch,
    eventually: Callable[..., Awaitable[None]],
    error: Exception,
) -> None:
    queue, announce, failures = processes(), Policies.announce, iter([error])

    async def fail_once(self: Policies, role: Role) -> None:
        for failure in failures:
            raise failure
        await announce(self, role)

    monkeypatch.setattr(Policies, "announce", fail_once)
    monkeypatch.setattr(policies, "RETRY_S", 0.01)
    if not isinstance(error, RedisUnavailable):
        monkeypatch.setattr(policies, "ANNOUNCE_EVERY_S", 0.01)
    announcing = asyncio.create_task(queue.policies.keep_announced("api"))
    try:
        await eventually(lambda: bool(queue.client.used_policies), "an announcement after the error")
        assert not announcing.done()
    finally:
        announcing.cancel()


async def test_the_first_request_of_an_api_follows_the_policies(
    processes: Callable[..., Queue], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, api = processes(input_retention_s=HOUR_S), processes()
    await worker.policies.announce("worker")
    monkeypatch.setattr(Policies, "keep_announced", lambda *_: asyncio.Event().wait())
    async with serving(api, tmp_path):
        assert api.client.policy("input_retention_s") == HOUR_S


async def test_a_process_of_chores_announces_at_its_start_and_logs_a_conflict_once(
    processes: Callable[..., Queue],
) -> None:
    """Its chores open queues of their own, and announce nothing."""
    api, chores = processes(retention_s=HOUR_S), processes(retention_s=2 * HOUR_S)
    await api.policies.announce("api")
    configured, announced = chores.client.settings, Background(lambda _: _announcing(chores.client.settings))
    with capture_logs() as logs:
        try:
            for _ in range(3):
                await asyncio.to_thread(announced.run)
                await _move_on(configured)
        finally:
            await asyncio.to_thread(announced.close)
    assert [line["event"] for line in logs].count("policies_differ") == 1
    assert {one.role for one in await api.policies.load()} == {"api", "chores"}
