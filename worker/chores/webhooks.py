"""Delivering webhooks: one pass over all that is due, few at a time to one host, so that a dead one stalls nobody."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter

import structlog

from shared.config import settings
from shared.config.settings import Settings
from shared.errors import FusequeueError
from shared.inputs.fetch_guard import FetchGuard, FetchResponse, FetchRules
from shared.job import JobRecord
from shared.protocols.replicate.predictions import webhook_body
from shared.queue import DeliveryAttempt, DueDelivery, Queue, WebhookDelivery
from shared.runtime.clock import now_ms
from shared.webhooks import AttemptOutcome, DeliveryState, attempt_outcome, body, headers
from worker.chores import rq_queue

log = structlog.get_logger()

DELIVER = "worker.chores.webhooks.deliver"
AT_ONCE = 64
AT_ONCE_TO_A_HOST = 4
PIECE = 100
BUDGET_S = 25.0
"""After this nothing more is begun: with the longest answer a pass ends well before rq would cut it off."""


def deliver() -> int:
    """Make one pass over what is due, and return how many attempts were made."""
    return asyncio.run(_deliver(settings.load()))


async def _deliver(configured: Settings) -> int:
    queue = Queue.connect(configured)
    try:
        async with asyncio.timeout(0.95 * rq_queue.JOB_TIMEOUT_S):
            return await Pass(
                queue, FetchGuard(FetchRules.for_webhooks(configured)), (configured.public_url or "").rstrip("/")
            ).run()
    finally:
        await queue.close()


class Pass:
    """One pass; events that come in meanwhile are delivered too, while a slow host is still being waited for."""

    def __init__(self, queue: Queue, guard: FetchGuard, base_url: str) -> None:
        self._queue = queue
        self._guard = guard
        self._base_url = base_url
        self._under_way: dict[asyncio.Task[None], str] = {}
        self._again_ms = round((guard.rules.timeout_s + rq_queue.JOB_TIMEOUT_S) * 1000)

    async def run(self) -> int:
        """Deliver until nothing is due or the budget is spent; returns the attempts made."""
        made = 0
        until_s = time.monotonic() + BUDGET_S
        try:
            while time.monotonic() < until_s:
                expanded = await self._queue.webhooks.expand_outbox(PIECE)
                due = await self._claim()
                for one in due:
                    self._under_way[asyncio.create_task(self._attempt(one))] = one.delivery.host
                made += len(due)
                if not (expanded or due or self._under_way):
                    break
                await self._settle(timeout_s=0.0 if expanded or due else 0.5)
            while self._under_way:
                await self._settle(timeout_s=None)
        finally:
            for task in self._under_way:
                task.cancel()
        return made

    async def _claim(self) -> list[DueDelivery]:
        room = AT_ONCE - len(self._under_way)
        if room <= 0:
            return []
        hosts = Counter(self._under_way.values())
        return await self._queue.webhooks.claim_deliveries(room, AT_ONCE_TO_A_HOST, hosts, self._again_ms)

    async def _settle(self, timeout_s: float | None) -> None:
        if not self._under_way:
            return
        done, _ = await asyncio.wait(self._under_way, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            del self._under_way[task]
            task.result()

    async def _attempt(self, due: DueDelivery) -> None:
        delivery = due.delivery
        began = time.monotonic()
        attempt = DeliveryAttempt(at_ms=now_ms())
        if not due.secrets:
            verdict = AttemptOutcome(DeliveryState.FAILED)
            attempt = attempt.model_copy(update={"error": "its endpoint was deleted or disabled"})
        else:
            reply, error = await self._send(due)
            status = None if reply is None else reply.status
            verdict = attempt_outcome(delivery.attempts + 1, status, _retry_after_s(reply), random.random())
            spent_ms = round(1000 * (time.monotonic() - began))
            attempt = attempt.model_copy(update={"status": status, "error": error, "duration_ms": spent_ms})
        await self._queue.webhooks.note_attempt(delivery.id, verdict, attempt)
        log.info(
            "webhook_attempt",
            delivery=delivery.id,
            event_type=delivery.type,
            host=delivery.host,
            attempt=delivery.attempts + 1,
            status=attempt.status,
            error=attempt.error,
            outcome=verdict.step.value,
        )

    async def _send(self, due: DueDelivery) -> tuple[FetchResponse | None, str | None]:
        delivery = due.delivery
        record = await self._queue.jobs.get(delivery.job_id) if delivery.job_id else None
        content = self._content(delivery, record)
        signed = headers(f"msg_{delivery.event_id}", content, due.secrets, now_ms())
        try:
            return await self._guard.send("POST", delivery.url, headers=signed, content=content), None
        except FusequeueError as error:
            return None, error.message

    def _content(self, delivery: WebhookDelivery, record: JobRecord | None) -> bytes:
        """Return the body: of the form that the job's client asked for, where it goes to that one's own URL."""
        hook = record.job.webhook if record is not None and delivery.endpoint == "job" else None
        if record is not None and hook is not None and hook.version is not None:
            return webhook_body(record, hook.version, delivery.type, self._base_url)
        return body(delivery.type, delivery.at_ms, delivery.job_id, record, self._base_url)


def _retry_after_s(reply: FetchResponse | None) -> float | None:
    told = "" if reply is None else reply.headers.get("retry-after", "")
    return float(told) if told.isdigit() else None
