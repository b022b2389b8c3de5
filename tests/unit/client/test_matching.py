"""Changes of one job and of all that match."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta

import httpx
import pytest

from api.routes import job_lists, matching_jobs
from api.routes.operators import dead_letters
from fusequeue import AsyncClient, InvalidArgument, RefusedError
from shared.queue import Queue

Work = Callable[..., Awaitable[bytes]]


async def test_a_queued_job_is_updated(api: AsyncClient) -> None:
    job = await api.submit("demo", "a red circle")
    updated = await api.update(job, priority="interactive", deadline_s=60)
    assert (updated.priority, updated.deadline_at is not None) == ("interactive", True)
    assert (await api.update(job.id, remove_deadline=True)).deadline_at is None
    await api.cancel(job)
    with pytest.raises(RefusedError, match="only queued jobs can be changed"):
        await api.update(job, priority="bulk")


async def test_a_job_is_for_later_by_a_time_or_by_a_delay(api: AsyncClient) -> None:
    at = datetime.now(UTC).replace(microsecond=123_000) + timedelta(hours=1)
    job = await api.submit("demo", "a red circle", not_before=at)
    assert job.not_before == at
    for delay in (timedelta(hours=1), 3600, 3600.0):
        job = await api.submit("demo", "a red circle", not_before=delay)
        assert job.not_before == job.created_at + timedelta(hours=1)
    (line,) = [line async for line in api.submit_many([{"model": "demo", "prompt": "x", "not_before": timedelta(1)}])]
    assert (await api.get(line.id or "")).not_before is not None
    with pytest.raises(InvalidArgument, match=r"not_before: .* has no time zone"):
        await api.submit("demo", "a red circle", not_before=datetime(2026, 1, 31, 22))
    with pytest.raises(RefusedError, match=r"not_before: .*30 days"):
        await api.submit("demo", "a red circle", not_before=timedelta(days=31))


async def test_a_job_is_paused_until_it_is_resumed(api: AsyncClient, work: Work) -> None:
    job = await api.submit("demo", "a red circle")
    paused = await api.pause(job)
    assert (paused.status, paused.queue and paused.queue.reason) == ("queued", "paused")
    assert (await api.pause(job)).paused_at == paused.paused_at is not None
    assert (await api.resume(job.id)).paused_at is None
    await work()
    assert (await api.pause(job)).status == "succeeded"


async def test_the_children_of_a_job_are_listed_and_changed(api: AsyncClient) -> None:
    parent = await api.submit("demo", "a red circle")
    child = await api.submit("demo", "a blue circle", after=[parent.id])
    assert [job.id async for job in api.jobs(parent=parent.id)] == [child.id]
    assert (await api.matching.cancel(parent=parent.id)).ids == [child.id]


async def test_an_update_that_changes_nothing_is_refused_before_it_is_sent(api: AsyncClient) -> None:
    for change in ({}, {"deadline_s": 5, "remove_deadline": True}, {"deadline_s": float("inf")}):
        with pytest.raises(InvalidArgument):
            await api.update("job_1", **change)
        with pytest.raises(InvalidArgument):
            await api.matching.update(model="demo", **change)


async def test_a_failed_job_is_retried(api: AsyncClient, work: Work) -> None:
    job = await api.submit("demo", "a red circle", seed=7)
    await work(failure="broken")
    new = await api.retry(job)
    assert (new.id != job.id, new.seed, new.status) == (True, 7, "queued")
    assert (await api.retry(job)).id == new.id


async def test_all_that_match_are_changed_in_pieces(api: AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (job_lists, matching_jobs):
        monkeypatch.setattr(module, "MAX_SCANNED", 2)
    monkeypatch.setattr(job_lists, "SCAN_PAGE_SIZE", 2)
    monkeypatch.setattr(matching_jobs, "MAX_RETRIED", 2)
    monkeypatch.setattr(matching_jobs, "MAX_DELETED", 2)
    ids = [(await api.submit("demo", "x", metadata={"set": "a"})).id for _ in range(5)]
    await api.submit("demo", "x", metadata={"set": "b"})
    mine = {"metadata": {"set": "a"}, "created_before": datetime.now(UTC) + timedelta(days=1)}
    assert (await api.matching.update(priority="bulk", **mine)).ids == ids
    dry = await api.matching.cancel(dry_run=True, **mine)
    assert (dry.ids, dry.dry_run) == (ids[::-1], True)
    assert len([job async for job in api.jobs(status="queued")]) == 6
    assert (await api.matching.cancel(status=["queued", "running"], **mine)).ids == ids[::-1]
    retried = await api.matching.retry(**mine)
    assert list(retried.new_ids) == ids
    deleted = await api.matching.delete(**mine)
    assert (deleted.ids, deleted.skipped) == (ids[::-1], 5), "the new jobs match too and have not ended"


async def test_dead_letters_that_match_are_redriven_and_purged(
    api: AsyncClient, fake_queue: Queue, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters, "MAX_CHANGED", 1)
    ids = []
    for _ in range(2):
        ids.append((await api.submit("demo", "x")).id)
        await work(failure="broken")
        await fake_queue.dead_letters.bury(ids[-1], "worker_lost", "")
    assert (await api.matching.redrive(reason="worker_lost", dry_run=True)).ids == ids
    assert (await api.matching.redrive(tenant="other")).ids == []
    assert [letter.id async for letter in api.dead_letters(model="demo")] == ids[::-1]
    assert [letter async for letter in api.dead_letters(at_before=datetime(2026, 1, 1, tzinfo=UTC))] == []
    assert (await api.matching.purge(model="demo")).ids == ids
    assert [letter async for letter in api.dead_letters()] == []


async def test_a_repeated_retry_has_the_same_key() -> None:
    """A service that lost its response knows by it which jobs are the new ones."""
    keys: list[str] = []

    def respond(request: httpx.Request) -> httpx.Response:
        keys.append(request.headers["Idempotency-Key"])
        if len(keys) == 1:
            raise httpx.ReadError("lost")
        return httpx.Response(200, json={"ids": ["job_1"], "has_more": False, "new_ids": {"job_1": "job_2"}})

    async with AsyncClient("http://api.test", transport=httpx.MockTransport(respond)) as client:
        assert (await client.matching.retry(status="failed")).new_ids == {"job_1": "job_2"}
        await client.matching.retry(status="failed")
    assert (len(keys), keys[0] == keys[1] != keys[2]) == (3, True)
