"""Webhook delivery: one pass over the due deliveries, with a limit per host so that a dead host stalls no other."""

import asyncio
import random
import time
from collections import Counter

import structlog

from shared.config import settings
from shared.config.settings import Settings
from shared.errors import FusequeueError
from shared.inputs.fetch_guard import FetchGuard, FetchResponse, FetchRules
from shared.protocols.replicate.predictions import webhook_body
from shared.queue import Queue
from shared.queue.webhooks import DeliveryAttempt, DueDelivery
from shared.runtime.clock import now_ms
from shared.webhooks import AttemptOutcome, DeliveryState, attempt_outcome, body, headers
from worker.chores import rq_queue

log = structlog.get_logger()

MAX_CONCURRENT = 64
MAX_CONCURRENT_PER_HOST = 4
OUTBOX_CHUNK = 100
BUDGET_S = 25.0
"""No attempt starts after this time: with the longest timeout a pass ends well before rq interrupts it."""


def deliver() -> int:
    """Run one pass and return the number of attempts."""
    return asyncio.run(_deliver(settings.load()))


async def _deliver(configured: Settings) -> int:
    guard, base_url = FetchGuard(FetchRules.for_webhooks(configured)), (configured.public_url or "").rstrip("/")
    async with rq_queue.job_queue(configured, 0.95 * rq_queue.JOB_TIMEOUT_S) as queue:
        return await DeliveryPass(queue, guard, base_url).run()


class DeliveryPass:
    """One pass; also delivers events that arrive while it waits for slow hosts."""

    def __init__(self, queue: Queue, guard: FetchGuard, base_url: str) -> None:
        self._queue = queue
        self._guard = guard
        self._base_url = base_url
        self._hosts: dict[asyncio.Task[None], str] = {}
        self._reclaim_ms = round((guard.rules.timeout_s + rq_queue.JOB_TIMEOUT_S) * 1000)

    async def run(self) -> int:
        """Deliver until nothing is due or `BUDGET_S` is over; returns the number of attempts."""
        attempts = 0
        until_s = time.monotonic() + BUDGET_S
        try:
            while time.monotonic() < until_s:
                expanded = await self._queue.webhooks.expand_outbox(OUTBOX_CHUNK)
                due = await self._claim()
                for item in due:
                    self._hosts[asyncio.create_task(self._attempt(item))] = item.delivery.host
                attempts += len(due)
                if not (expanded or due or self._hosts):
                    break
                await self._reap(timeout_s=0.0 if expanded or due else 0.5)
            while self._hosts:
                await self._reap(timeout_s=None)
        finally:
            for task in self._hosts:
                task.cancel()
        return attempts

    async def _claim(self) -> list[DueDelivery]:
        free = MAX_CONCURRENT - len(self._hosts)
        if not free:
            return []
        running = Counter(self._hosts.values())
        return await self._queue.webhooks.claim_deliveries(free, MAX_CONCURRENT_PER_HOST, running, self._reclaim_ms)

    async def _reap(self, timeout_s: float | None) -> None:
        """Wait for an attempt to end and raise its error."""
        if not self._hosts:
            return
        done, _ = await asyncio.wait(self._hosts, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            del self._hosts[task]
            task.result()

    async def _attempt(self, due: DueDelivery) -> None:
        delivery = due.delivery
        started_s = time.monotonic()
        attempt = DeliveryAttempt(at_ms=now_ms())
        if not due.secrets:
            outcome = AttemptOutcome(DeliveryState.FAILED)
            attempt = attempt.model_copy(update={"error": "the endpoint was deleted or disabled"})
        else:
            reply, error = await self._send(due)
            status = None if reply is None else reply.status
            outcome = attempt_outcome(delivery.attempts + 1, status, _retry_after_s(reply), random.random())
            duration_ms = round(1000 * (time.monotonic() - started_s))
            attempt = attempt.model_copy(update={"status": status, "error": error, "duration_ms": duration_ms})
        await self._queue.webhooks.record_attempt(delivery.id, outcome, attempt)
        log.info(
            "webhook_attempted",
            delivery=delivery.id,
            event_type=delivery.type,
            host=delivery.host,
            attempt=delivery.attempts + 1,
            outcome=outcome.state.value,
            **attempt.model_dump(include={"status", "error"}),
        )

    async def _send(self, due: DueDelivery) -> tuple[FetchResponse | None, str | None]:
        delivery = due.delivery
        record = await self._queue.jobs.get(delivery.job_id) if delivery.job_id else None
        webhook = record.job.webhook if record is not None and delivery.endpoint == "job" else None
        if record is not None and webhook is not None and webhook.version is not None:  # of a Replicate request
            content = webhook_body(record, webhook.version, delivery.type, self._base_url)
        else:
            content = body(delivery.type, delivery.at_ms, delivery.job_id, record, self._base_url)
        signed = headers(f"msg_{delivery.event_id}", content, due.secrets, now_ms())
        try:
            return await self._guard.send("POST", delivery.url, headers=signed, content=content), None
        except FusequeueError as error:
            return None, error.message


def _retry_after_s(reply: FetchResponse | None) -> float | None:
    value = "" if reply is None else reply.headers.get("retry-after", "")
    return float(value) if value.isdigit() else None
