"""Webhook delivery: one pass over the due deliveries.

A host has a few slots, so that a dead one stalls no other, and a tenant at most as many as are free.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime

import structlog

from api.background import Background, stopping
from api.protocols.chore_parts import CHORE_PARTS
from api.webhook_messages import WebhookEvent, body, headers
from shared.config.settings import Settings
from shared.errors import FusequeueError, Unavailable
from shared.inputs.fetch_guard import FetchGuard, FetchResponse, FetchRules
from shared.job_record import JobRecord
from shared.queue import Queue
from shared.queue.tenants.webhooks import DeliveryAttempt, DueDelivery, WebhookDelivery
from shared.runtime import tracing
from shared.runtime.clock import now_ms
from shared.runtime.tracing import Attributes, SpanKind, SpanStart
from shared.webhooks import AttemptOutcome, DeliveryState, attempt_outcome, retry_after_s

log = structlog.get_logger()

SLOTS = 64
SLOTS_PER_HOST = 4
RECLAIM_MARGIN_S = 10.0
"""An attempt ends within its timeout and the time of a few Redis commands; later its sender counts as killed."""

OUTBOX_CHUNK = 100
BUDGET_S = 25.0
"""A pass ends after this time, well before rq interrupts it."""


def deliver() -> int:
    """Run one pass and return the number of attempts."""
    return BACKGROUND.run()


@asynccontextmanager
async def opened(configured: Settings) -> AsyncIterator["DeliveryPass"]:
    """Open what deliveries need; at the end, wait for those in progress."""
    guard, base_url = FetchGuard(FetchRules.for_webhooks(configured)), (configured.public_url or "").rstrip("/")
    queue = Queue.connect(configured)
    deliveries = DeliveryPass(queue, guard, base_url)
    try:
        yield deliveries
    finally:
        await deliveries.drain()
        await queue.close()


BACKGROUND = Background(opened)


class DeliveryPass:
    """Passes that follow each other; attempts in progress at the end of one continue."""

    def __init__(self, queue: Queue, guard: FetchGuard, base_url: str) -> None:
        self._queue = queue
        self._guard = guard
        self._base_url = base_url
        self._running: dict[asyncio.Task[None], tuple[str, str]] = {}
        self._reclaim_ms = round((guard.rules.timeout_s + RECLAIM_MARGIN_S) * 1000)

    async def run(self) -> int:
        """Begin attempts until none is due or in progress, or `BUDGET_S` is over; returns their number."""
        attempts = 0
        until_s = time.monotonic() + BUDGET_S
        while time.monotonic() < until_s and not stopping.is_set():
            expanded = await self._queue.webhooks.expand_outbox(OUTBOX_CHUNK)
            due = await self._claim()
            for item in due:
                task = asyncio.create_task(self._attempt(item))
                self._running[task] = (item.delivery.tenant, item.delivery.host)
            attempts += len(due)
            if not (expanded or due or self._running):
                break
            await self._reap(timeout_s=0.0 if expanded or due else 0.5)
        await self._queue.maintenance.note_chore("deliver")
        return attempts

    async def drain(self) -> None:
        """Wait for the attempts in progress."""
        while self._running:
            await self._reap(timeout_s=None)

    async def _claim(self) -> list[DueDelivery]:
        if len(self._running) == SLOTS:
            return []
        running = Counter(self._running.values())
        return await self._queue.webhooks.claim_deliveries(SLOTS, SLOTS_PER_HOST, running, self._reclaim_ms)

    async def _reap(self, timeout_s: float | None) -> None:
        """Wait for an attempt to end."""
        if not self._running:
            return
        done, _ = await asyncio.wait(self._running, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            del self._running[task]

    async def _attempt(self, due: DueDelivery) -> None:
        """Make and record one attempt; an error of our own is logged, and the delivery is due again later."""
        try:
            await self._record(due, *await self._make(due))
        except Unavailable as error:
            log.warning("webhook_not_recorded", delivery=due.delivery.id, code=error.code, error=error.message)
        except Exception:
            log.exception("webhook_attempt_failed", delivery=due.delivery.id)

    async def _make(self, due: DueDelivery) -> tuple[AttemptOutcome, DeliveryAttempt]:
        delivery, attempt = due.delivery, DeliveryAttempt(at_ms=now_ms())
        if not due.secrets:
            deleted = {"error": "the endpoint was deleted or disabled"}
            return AttemptOutcome(DeliveryState.FAILED), attempt.model_copy(update=deleted)
        started_s = time.monotonic()
        reply, error = await self._send(due)
        status = None if reply is None else reply.status
        outcome = attempt_outcome(delivery.attempts + 1, status, _retry_after_s(reply), random.random())
        duration_ms = round(1000 * (time.monotonic() - started_s))
        return outcome, attempt.model_copy(update={"status": status, "error": error, "duration_ms": duration_ms})

    async def _record(self, due: DueDelivery, outcome: AttemptOutcome, attempt: DeliveryAttempt) -> None:
        delivery = due.delivery
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
        event = WebhookEvent(delivery.type, delivery.at_ms, delivery.job_id, record, webhook, self._base_url)
        bodies = (part.webhook_body(event) for part in CHORE_PARTS)
        content = next((made for made in bodies if made is not None), None) or body(event)
        signed = headers(f"msg_{delivery.event_id}", content, due.secrets, now_ms())
        guard = replace(self._guard, tenant=delivery.tenant)
        with tracing.spanning(_span(delivery, record)) as span:
            traced = {} if span is None else span.context.headers
            try:
                reply = await guard.send("POST", delivery.url, headers={**signed, **traced}, content=content)
            except FusequeueError as error:
                if span is not None:
                    span.fail(error.code)
                return None, error.message
            if span is not None:
                span.set({"http.response.status_code": reply.status})
                if not 200 <= reply.status < 300:
                    span.fail(f"status {reply.status}")
            return reply, None


def _span(delivery: WebhookDelivery, record: JobRecord | None) -> SpanStart:
    """Return the span of an attempt, in the trace of the job's submission."""
    attributes: Attributes = {
        "fusequeue.job.id": delivery.job_id or None,
        "fusequeue.delivery.id": delivery.id,
        "fusequeue.event": delivery.type,
        "fusequeue.attempt": delivery.attempts + 1,
        "fusequeue.tenant": delivery.tenant,
        "server.address": delivery.host,
        "http.request.method": "POST",
    }
    trace = None if record is None else record.job.trace
    return SpanStart("webhook", SpanKind.CLIENT, trace, attributes=attributes)


def _retry_after_s(reply: FetchResponse | None) -> float | None:
    value = "" if reply is None else reply.headers.get("retry-after", "")
    return retry_after_s(value, datetime.now(UTC))
