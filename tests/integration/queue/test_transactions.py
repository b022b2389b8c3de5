"""Transactions of two processes at the same moment: what one has changed, the other does not do again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from harness.queue import put

from shared.batch import Batch, File, Part
from shared.queue import Queue, Submission
from shared.queue.maintenance.changes import JobUpdate
from shared.queue.tenants.webhooks import DeliveryAttempt
from shared.queue.transactions import Transaction
from shared.runtime.clock import new_id, now_ms
from shared.webhooks import AttemptOutcome, DeliveryState, SigningSecret, WebhookEndpoint, new_secret

READS = range(1, 10)
"""More than any of the transactions does."""


@contextmanager
def before_read(number: int, other: Callable[[], Awaitable[Any]]) -> Iterator[None]:
    """Let `other` run before the read with this number, from 1."""
    read, reads = Transaction.read, 0

    async def counted(transaction: Transaction, *commands: Any, **options: Any) -> list[Any]:
        nonlocal reads
        reads += 1
        if reads == number:
            Transaction.read = read  # type: ignore[method-assign]
            await other()
        return await read(transaction, *commands, **options)

    Transaction.read = counted  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Transaction.read = read  # type: ignore[method-assign]


@pytest.mark.parametrize("number", READS)
@pytest.mark.parametrize("delivered", [False, True])
async def test_a_delivery_is_claimed_once(queue: Queue, number: int, delivered: bool) -> None:
    """Also if the other process has delivered it by then."""
    secrets = (SigningSecret(secret=new_secret()),)
    endpoint = WebhookEndpoint(
        id="we_a", url="https://example.com/", states=("queued",), secrets=secrets, created_at_ms=now_ms()
    )
    await queue.webhooks.create_endpoint("default", endpoint)
    await queue.webhooks.send_test("default", endpoint, new_id("test"))
    claimed: list[str] = []

    async def claim() -> None:
        due = await queue.webhooks.claim_deliveries(10, 10, {}, 60_000)
        claimed.extend(one.delivery.id for one in due)
        for one in due if delivered else ():
            outcome, attempt = AttemptOutcome(DeliveryState.DELIVERED), DeliveryAttempt(at_ms=now_ms(), status=200)
            await queue.webhooks.record_attempt(one.delivery.id, outcome, attempt)

    with before_read(number, claim):
        await claim()
    await claim()
    assert len(claimed) == 1


@pytest.mark.parametrize("number", READS)
async def test_a_batch_is_claimed_once(queue: Queue, number: int) -> None:
    now = now_ms()
    file = File(
        id=new_id("file"),
        tenant="default",
        filename="in.jsonl",
        purpose="batch",
        bytes=1,
        created_at_ms=now,
        expires_at_ms=now + 600_000,
    )
    await queue.files.begin("default", file.id, 1)
    await queue.files.put(file, [Part("0.jsonl", 1)])
    batch = Batch(
        id=new_id("batch"),
        tenant="default",
        endpoint="/v1/jobs",
        input_file_id=file.id,
        output_file_id=new_id("file"),
        error_file_id=new_id("file"),
        base_url="",
        created_at_ms=now,
        expires_at_ms=now + 600_000,
    )
    await queue.batches.create(batch)
    claimed: list[tuple[str, str]] = []

    async def claim() -> None:
        claimed.extend(await queue.batches.due(4, {}, 60_000))

    with before_read(number, claim):
        await claim()
    await claim()
    assert claimed == [("default", batch.id)]


@pytest.mark.parametrize("number", READS)
async def test_a_job_whose_deadline_is_extended_while_it_expires_is_not_late(
    queue: Queue, make_submission: Callable[..., Submission], number: int
) -> None:
    (job_id,) = await put(queue, make_submission(time_limit_ms=-1))
    redis, keys = queue.client.redis, queue.client.redis_keys

    async def extend() -> None:
        await queue.changes.update([job_id], JobUpdate(time_limit_ms=600_000))

    with before_read(number, extend):
        ended = await queue.maintenance.expire()
    if not ended:
        assert await redis.zscore(keys.late, job_id) is None
        assert float(await redis.zscore(keys.deadlines, job_id)) > now_ms()
