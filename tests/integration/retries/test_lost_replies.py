"""Lost replies: what was applied is applied once, whatever the client sends again."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from harness.queue import MODELS, claim_ids, end, put, state_of
from harness.tcp_proxy import TcpProxy, script_pattern

from shared.config.settings import Settings
from shared.errors import RedisUnavailable
from shared.job import State
from shared.queue import Queue, Submission, claims
from shared.queue.connections import pools

Make = Callable[..., Submission]

LOST_REPLIES = int(os.environ.get("LOST_REPLIES", "50"))
"""Jobs whose submit and claim are applied and not answered."""


@pytest.fixture
async def proxy(redis_server: Any) -> AsyncIterator[TcpProxy]:
    async with TcpProxy(redis_server.port) as proxy:
        yield proxy


@pytest.fixture
async def proxied(proxy: TcpProxy, queue: Queue) -> AsyncIterator[Queue]:
    """The namespace of `queue`, through the proxy."""
    settings: Settings = queue.client.settings.model_copy(update={"redis_url": proxy.redis_url})
    proxied = Queue.connect(settings)
    yield proxied
    await proxied.close()


def lose(proxy: TcpProxy, queue: Queue, script: str, count: int = 1) -> None:
    """Lose the next replies of a script."""
    proxy.drop_replies(script_pattern(script, queue.client.settings), count)


@pytest.mark.parametrize("key", ["k", None])
async def test_a_submit_whose_reply_is_lost_queues_its_job_once(
    proxy: TcpProxy, proxied: Queue, make_submission: Make, key: str | None
) -> None:
    lose(proxy, proxied, "submit")
    one = make_submission(idempotency_key=key, fingerprint="f")
    assert await put(proxied, one) == [one.job.id]
    assert proxy.dropped == 1
    assert [depth.queued_jobs for depth in await proxied.workers.queue_depths()] == [1]
    assert await claim_ids(proxied) == [one.job.id]


async def test_a_claim_whose_reply_is_lost_returns_its_jobs(
    proxy: TcpProxy, proxied: Queue, make_submission: Make
) -> None:
    """They run together and at once, not solo after their leases."""
    ids = await put(proxied, *[make_submission() for _ in range(3)])
    lose(proxy, proxied, "take")
    claims = await proxied.claims.claim("w1", MODELS, 8)
    assert proxy.dropped == 1
    assert [one.job.id for one in claims] == ids
    assert {one.epoch for one in claims} == {1}
    assert not any(one.must_run_solo for one in claims)
    assert await state_of(proxied, ids[0]) is State.RUNNING


async def test_a_join_whose_reply_is_lost_returns_its_jobs(
    proxy: TcpProxy, proxied: Queue, make_submission: Make
) -> None:
    ids = await put(proxied, *[make_submission() for _ in range(3)])
    (one,) = await proxied.claims.claim("w1", MODELS, 1)
    lose(proxy, proxied, "take")
    joined = await proxied.claims.join("w1", one.signature, 8, models=MODELS)
    assert proxy.dropped == 1
    assert [one.job.id, *(other.job.id for other in joined)] == ids


async def test_a_claim_that_failed_is_returned_by_the_next_one(
    proxy: TcpProxy, proxied: Queue, queue: Queue, make_submission: Make
) -> None:
    """The client gives up after its second attempt; the worker then claims or joins again."""
    proxied.client.shared = None  # with it, there is one more attempt
    first, second, third = await put(proxied, *[make_submission() for _ in range(3)])
    lose(proxy, proxied, "take", 2)
    with pytest.raises(RedisUnavailable):
        await proxied.claims.claim("w1", MODELS, 1)
    assert await state_of(queue, first) is State.RUNNING
    await proxied.claims.next_ready_ms(MODELS, worker="w1")  # a worker may ask for that in between
    (again,) = await proxied.claims.claim("w1", MODELS, 1)
    assert (again.job.id, again.epoch) == (first, 1)
    lose(proxy, proxied, "take", 2)
    with pytest.raises(RedisUnavailable):
        await proxied.claims.join("w1", again.signature, 1, models=MODELS)
    assert await claim_ids(proxied, 1) == [second]
    assert await claim_ids(proxied, 1) == [third]


async def test_a_repeated_claim_does_not_return_a_job_that_another_worker_has(
    proxy: TcpProxy, proxied: Queue, queue: Queue, make_submission: Make
) -> None:
    """Its lease can end before the worker reaches Redis again."""
    proxied.client.shared = None
    (job_id,) = await put(proxied, make_submission())
    lose(proxy, proxied, "take", 2)
    with pytest.raises(RedisUnavailable):
        await proxied.claims.claim("w1", MODELS, 1)
    await queue.client.redis.zadd(queue.client.redis_keys.leases, {job_id: 1})
    assert await queue.maintenance.reclaim() == [job_id]
    assert await claim_ids(queue, worker="w2") == [job_id]
    assert await claim_ids(proxied) == []


async def test_a_command_that_times_out_is_applied_once(
    proxy: TcpProxy, queue: Queue, make_submission: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection stays open without a reply, as behind a firewall that forgot it."""
    monkeypatch.setattr(pools, "COMMAND_TIMEOUT_S", 0.3)
    proxied = Queue.connect(queue.client.settings.model_copy(update={"redis_url": proxy.redis_url}))
    ids = await put(queue, make_submission(), make_submission())
    for script in ("take", "admit"):
        proxy.drop_replies(script_pattern(script, queue.client.settings), then="silent")
    assert await claim_ids(proxied, 1) == ids[:1]
    assert (await proxied.api_keys.admit("acme", 10)).remaining == 9
    assert proxy.dropped == 2
    assert await claim_ids(proxied, 1) == ids[1:]
    await proxied.close()


async def test_jobs_whose_replies_were_lost_run_once(
    proxy: TcpProxy, proxied: Queue, queue: Queue, make_submission: Make
) -> None:
    """Every submit and every claim is applied, and its first reply is lost."""
    at_once = asyncio.Semaphore(16)
    runs: list[str] = []

    async def submit(number: int) -> str:
        submission = make_submission(idempotency_key=f"k{number}", fingerprint="f")
        proxy.drop_replies(submission.job.id.encode())
        async with at_once:
            return (await put(proxied, submission))[0]

    async def work(number: int) -> None:
        worker = f"worker-{number}."
        proxy.drop_replies(worker.encode())
        async with at_once:
            (one,) = await proxied.claims.claim(worker, MODELS, 1)
            runs.append(one.job.id)
            assert not one.must_run_solo
            assert await end(queue, one, worker)

    ids = await asyncio.gather(*(submit(number) for number in range(LOST_REPLIES)))
    assert proxy.dropped == LOST_REPLIES
    await asyncio.gather(*(work(number) for number in range(LOST_REPLIES)))
    assert proxy.dropped == 2 * LOST_REPLIES
    assert len(runs) == LOST_REPLIES
    assert sorted(runs) == sorted(set(ids))
    records = await queue.jobs.get_many(ids)
    assert {record and (record.state, record.attempts) for record in records} == {(State.SUCCEEDED, 1)}
    assert await queue.workers.queue_depths() == []


@pytest.mark.parametrize("lost", ["settle", "transact", "give_up"])
async def test_an_unreadable_job_does_not_take_the_others_of_its_claim_with_it(
    proxy: TcpProxy, proxied: Queue, queue: Queue, make_submission: Make, lost: str
) -> None:
    """Even if Redis cannot be reached while the job is rejected; its lease ends, and the next worker rejects it."""
    bad, newer, good = await put(proxied, make_submission(), make_submission(), make_submission())
    name = queue.client.redis_keys.job
    await queue.client.redis.hset(name(bad), "job", '{"schema_version": 1}')
    await queue.client.redis.hset(name(newer), "job", '{"schema_version": 99}')
    lose(proxy, proxied, lost, 2)
    assert await claim_ids(proxied) == [good]
    await proxied.claims.close()
    assert proxy.dropped == 2
    assert await state_of(queue, good) is State.RUNNING
    assert await queue.client.redis.hget(name(newer), "state") == "queued"
    assert await queue.client.redis.hget(name(bad), "state") == "failed"
    assert proxied.claims.outdated


async def test_readable_jobs_do_not_wait_long_until_others_are_rejected(
    queue: Queue, make_submission: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rejection takes as long as Redis does not respond."""
    monkeypatch.setattr(claims, "REJECT_WAIT_S", 0.1)
    settle, responds = queue.claims.settle, asyncio.Event()

    async def late(*args: Any) -> bool:
        await responds.wait()
        return await settle(*args)

    monkeypatch.setattr(queue.claims, "settle", late)
    bad, good = await put(queue, make_submission(), make_submission())
    await queue.client.redis.hset(queue.client.redis_keys.job(bad), "job", "{")
    try:
        async with asyncio.timeout(30):
            assert await claim_ids(queue) == [good]
    finally:
        responds.set()
    await queue.claims.close()
    assert await queue.client.redis.hget(queue.client.redis_keys.job(bad), "state") == "failed"


async def test_a_lease_is_renewed_in_time_over_connections_that_hang(
    proxy: TcpProxy, queue: Queue, make_submission: Make
) -> None:
    """No command that waits for its reply holds up a renewal, and a renewal does not wait for long itself."""
    lease_s = 2.0
    settings = queue.client.settings.model_copy(update={"redis_url": proxy.redis_url, "lease_ms": int(lease_s * 1000)})
    proxied = Queue.connect(settings)
    one = make_submission()
    await put(proxied, one)
    (claimed,) = await proxied.claims.claim("w1", MODELS, 1)
    proxy.drop_replies(b"TIME", pools.CONNECTIONS, then="silent")
    reads = [asyncio.create_task(proxied.client.now_ms()) for _ in range(pools.CONNECTIONS)]
    while proxy.dropped < pools.CONNECTIONS:
        await asyncio.sleep(0.01)
    proxy.drop_replies(script_pattern("renew", settings), then="silent")
    async with asyncio.timeout(lease_s):
        renewal = await proxied.claims.renew("w1", {claimed.job.id: claimed.epoch})
    assert not renewal.lost
    assert proxy.dropped == pools.CONNECTIONS + 1
    proxy.cut()
    await asyncio.gather(*reads, return_exceptions=True)
    await proxied.close()
