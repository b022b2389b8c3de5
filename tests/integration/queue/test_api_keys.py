"""Keys and limits as Redis holds them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from harness.queue import names_left, put

from shared.auth import Rate, Scope, TenantLimits, id_of
from shared.errors import FusequeueError, InvalidRequest, QueueFull
from shared.queue import Queue, Submission

Eventually = Callable[..., Awaitable[None]]
READ = frozenset({Scope.JOBS_READ})


async def test_only_a_digest_is_kept(queue: Queue) -> None:
    """The content of Redis reveals no key."""
    token, key = await queue.api_keys.create("acme", READ, name="laptop")
    for name in await names_left(queue):
        kept = await queue.client.redis.eval(
            "return redis.call('DUMP', KEYS[1])", 1, queue.client.redis_keys.prefix + name
        )
        assert token[13:] not in name + kept
    known = (await queue.api_keys.identify(key.id, "default")).key
    assert known is not None
    assert known.matches(token)
    assert (known.tenant, known.scopes, known.name, known.last_used_at_ms) == ("acme", READ, "laptop", None)


async def test_keys_are_required_from_the_first_key_on(queue: Queue) -> None:
    """Revoking the last key does not disable authentication."""
    assert not await queue.api_keys.any_created()
    assert not (await queue.api_keys.identify(None, "default")).keys_made
    _, key = await queue.api_keys.create("acme", READ)
    await queue.api_keys.revoke(key.id)
    await queue.client.redis.delete(queue.client.redis_keys.api_key(key.id))
    assert await queue.api_keys.all() == []
    assert await queue.api_keys.any_created()
    assert (await queue.api_keys.identify(None, "default")).keys_made


async def test_a_key_expires_in_redis_time(queue: Queue) -> None:
    """Expired keys differ from unknown ones for 30 days, then they are deleted."""
    _, key = await queue.api_keys.create("acme", READ, lives_s=3600)
    assert key.expires_at_ms == key.created_at_ms + 3_600_000
    fresh = (await queue.api_keys.identify(key.id, "default")).key
    await queue.client.redis.hset(queue.client.redis_keys.api_key(key.id), "expires", key.created_at_ms)
    over = (await queue.api_keys.identify(key.id, "default")).key
    assert fresh is not None
    assert over is not None
    assert (fresh.expired, over.expired) == (False, True)
    assert (
        29 * 86_400_000
        < await queue.client.redis.pttl(queue.client.redis_keys.api_key(key.id)) - 3_600_000
        <= 30 * 86_400_000
    )


async def test_a_revoked_key_is_kept_for_a_while(queue: Queue) -> None:
    _, key = await queue.api_keys.create("acme", READ)
    assert await queue.api_keys.revoke(key.id)
    first = (await queue.api_keys.all())[0].revoked_at_ms
    assert await queue.api_keys.revoke(key.id), "again is no error"
    assert (await queue.api_keys.all())[0].revoked_at_ms == first
    assert await queue.client.redis.pttl(queue.client.redis_keys.api_key(key.id)) > 0
    assert not await queue.api_keys.revoke("0123456789")


async def test_use_is_written_once_a_minute(queue: Queue) -> None:
    _, key = await queue.api_keys.create("acme", READ)
    await asyncio.gather(*(queue.api_keys.note_use(key.id) for _ in range(5)))
    first = (await queue.api_keys.all())[0].last_used_at_ms
    assert first is not None
    assert first >= key.created_at_ms
    await queue.api_keys.note_use(key.id)
    assert (await queue.api_keys.all())[0].last_used_at_ms == first
    await queue.client.redis.hincrby(queue.client.redis_keys.api_key(key.id), "used", -60_001)
    await queue.api_keys.note_use(key.id)
    assert ((await queue.api_keys.all())[0].last_used_at_ms or 0) >= first
    await queue.api_keys.note_use("0123456789")
    assert len(await queue.api_keys.all()) == 1


async def test_the_number_of_keys_is_limited_and_deleted_ones_do_not_count(queue: Queue) -> None:
    """10,000 rows: the next key is refused, until one of them is gone."""
    rows = {f"k{at}": at for at in range(10_000)}
    await queue.client.redis.zadd(queue.client.redis_keys.api_keys, rows)
    async with queue.client.redis.pipeline(transaction=False) as pipe:
        for key_id in rows:
            pipe.hset(
                queue.client.redis_keys.api_key(key_id),
                mapping={"digest": "x", "tenant": "a", "scopes": "", "created": 0},
            )
        await pipe.execute()
    with pytest.raises(FusequeueError, match="10000 keys"):
        await queue.api_keys.create("acme", READ)
    await queue.client.redis.delete(queue.client.redis_keys.api_key("k7"))
    token, _ = await queue.api_keys.create("acme", READ)
    assert id_of(token) in {key.id for key in await queue.api_keys.all()}


async def test_a_tenants_requests_are_counted_by_redis_time_over_all_processes(
    queue: Queue, queue_with: Callable[..., Queue], eventually: Eventually
) -> None:
    """The full limit at once, then one request at a time; another tenant has its own limit."""
    other = queue_with(namespace=queue.client.settings.namespace)
    rates = [await one.api_keys.admit("acme", 120) for _ in range(60) for one in (queue, other)]
    assert sum(rate.allowed for rate in rates) >= 120
    assert (rates[0].limit, rates[0].remaining, rates[0].reset_ms) == (120, 119, 500)
    refused = await _until_refused(queue)
    assert (refused.remaining, refused.limit) == (0, 120)
    assert 1 <= refused.retry_ms <= 500
    assert (await queue.api_keys.admit("other", 120)).remaining == 119

    async def again() -> bool:
        return (await queue.api_keys.admit("acme", 120)).allowed

    await eventually(again, "half a second has brought one more")
    assert 0 < await queue.client.redis.pttl(queue.client.redis_keys.request_rate("acme")) <= 60_000


async def _until_refused(queue: Queue) -> Rate:
    for _ in range(200):
        rate = await queue.api_keys.admit("acme", 120)
        if not rate.allowed:
            return rate
    raise AssertionError("200 more requests were allowed at once")


async def test_limits_of_a_tenant_override_the_settings(
    queue_with: Callable[..., Queue], make_submission: Callable[..., Submission]
) -> None:
    """And back again: `default` in the command line is None here."""
    queue = queue_with(max_queued_jobs_per_tenant=2)
    await queue.api_keys.set_limits("large", TenantLimits(queued_jobs=3, requests_per_minute=5))
    await put(queue, *[make_submission(tenant="large") for _ in range(3)])
    await put(queue, *[make_submission(tenant="other") for _ in range(2)])
    for tenant in ("large", "other"):
        (outcome,) = await queue.jobs.submit([make_submission(tenant=tenant)])
        assert isinstance(outcome, QueueFull)
    _, key = await queue.api_keys.create("large", READ)
    assert (await queue.api_keys.identify(key.id, "default")).limits == TenantLimits(5, 3, None)
    assert (await queue.api_keys.identify(None, "large")).limits == TenantLimits(5, 3, None)
    assert (await queue.api_keys.identify(None, "default")).limits == TenantLimits()
    assert await queue.api_keys.tenant_limits() == {"large": TenantLimits(5, 3, None)}
    await queue.api_keys.set_limits("large", TenantLimits())
    assert await queue.api_keys.tenant_limits() == {}
    with pytest.raises(InvalidRequest, match="running_slots"):
        await queue.api_keys.set_limits("large", TenantLimits(running_slots=0))


async def test_urls_are_signed_with_one_secret_by_all(queue: Queue, queue_with: Callable[..., Queue]) -> None:
    other = queue_with(namespace=queue.client.settings.namespace)
    first, second = await asyncio.gather(queue.api_keys.url_secret(), other.api_keys.url_secret())
    assert first == second == await queue.api_keys.url_secret()
    assert len(first) == 32
