"""Webhook endpoints, event outbox and deliveries in Redis."""

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Json, TypeAdapter

from shared.errors import Conflict, NotFound
from shared.queue.client import QueueComponent
from shared.queue.connections.errors import translated
from shared.queue.records import page_after, paired
from shared.queue.tenants import deliveries
from shared.queue.tenants.deliveries import ClaimedDelivery, NewDelivery
from shared.queue.tenants.endpoints import unexpired, write_endpoints
from shared.queue.transactions import Transaction
from shared.runtime.clock import now_ms
from shared.webhooks import (
    DISABLED_AFTER_S,
    AttemptOutcome,
    DeliveryState,
    SigningSecret,
    WebhookEndpoint,
    new_secret,
    rotate_secrets,
)

MAX_ENDPOINTS = 16
MAX_CHANGES = 8  # tries of one change of an endpoint that others change at the same moment
SCAN_PAGE_SIZE = 100  # deliveries read at once for a list
MAX_SCANNED = 1_000  # deliveries read for one page
_ACCOUNT = "account"
_SECRETS = TypeAdapter(tuple[SigningSecret, ...])


class DeliveryAttempt(BaseModel):
    """The response status of one attempt, or the error without a response."""

    at_ms: int
    status: int | None = None
    error: str | None = None
    duration_ms: int = 0


class WebhookDelivery(BaseModel):
    """One event for one URL. `endpoint` is `job` for a job's own webhook; `job_id` is empty for a test."""

    model_config = ConfigDict(frozen=True)

    id: str
    event_id: str
    tenant: str
    endpoint: str
    url: str
    host: str
    job_id: str
    type: str
    at_ms: int
    state: DeliveryState
    attempts: int
    next_at_ms: int | None = None
    log: Json[tuple[DeliveryAttempt, ...]] = ()


@dataclass(frozen=True)
class DueDelivery:
    """A delivery to attempt now, and its signing secrets; empty: the endpoint was deleted or disabled."""

    delivery: WebhookDelivery
    secrets: tuple[SigningSecret, ...]


@dataclass(frozen=True)
class DeliveryFilters:
    """Which deliveries of a tenant are listed, and in which order."""

    endpoint_id: str | None = None
    state: DeliveryState | None = None
    newest_first: bool = True

    @property
    def select(self) -> bool:
        """Whether deliveries must be read to find those that match."""
        return self.endpoint_id is not None or self.state is not None

    def match(self, delivery: WebhookDelivery) -> bool:
        return self.endpoint_id in (None, delivery.endpoint) and self.state in (None, delivery.state)


ALL_DELIVERIES = DeliveryFilters()


class Webhooks(QueueComponent):
    async def create_endpoint(self, tenant: str, endpoint: WebhookEndpoint) -> WebhookEndpoint:
        """Store a new endpoint and return it, or the one that has its id; raises `Conflict` at `MAX_ENDPOINTS`."""
        for _ in range(MAX_CHANGES):
            result = await self._put(tenant, endpoint.id, None, _stored(endpoint))
            if result == "full":
                raise Conflict(f"too many webhook endpoints: a tenant has at most {MAX_ENDPOINTS}; delete one first")
            if result == "ok":
                return endpoint
            with contextlib.suppress(NotFound):  # deleted meanwhile
                return await self.endpoint(tenant, endpoint.id)
        raise _changed_meanwhile()

    async def change_endpoint(
        self, tenant: str, endpoint_id: str, change: Callable[[WebhookEndpoint], WebhookEndpoint]
    ) -> WebhookEndpoint:
        """Replace an endpoint by what `change` returns for it, and return that; raises `NotFound`.

        `change` is called again if the endpoint has changed meanwhile.
        """
        for _ in range(MAX_CHANGES):
            before = await self._endpoint_wire(tenant, endpoint_id)
            changed = change(_endpoint(endpoint_id, before))
            if await self._replace(tenant, endpoint_id, before, _stored(changed)):
                return changed
        raise _changed_meanwhile()

    async def delete_endpoint(self, tenant: str, endpoint_id: str) -> None:
        """Delete an endpoint and stop its deliveries."""
        if await self._put(tenant, endpoint_id, None, None) == "none":
            raise _no_endpoint(endpoint_id)

    async def endpoints(self, tenant: str) -> list[WebhookEndpoint]:
        """Return a tenant's endpoints, oldest first."""
        with translated():
            fields = await self._redis.hgetall(self._keys.webhook_endpoints(tenant))
        fields = unexpired(fields, now_ms())
        endpoints = [_endpoint(name, wire) for name, wire in fields.items() if name.startswith("we_")]
        return sorted(endpoints, key=lambda endpoint: (endpoint.created_at_ms, endpoint.id))

    async def endpoint(self, tenant: str, endpoint_id: str) -> WebhookEndpoint:
        """Return one endpoint, or raise `NotFound`."""
        return _endpoint(endpoint_id, await self._endpoint_wire(tenant, endpoint_id))

    async def account_secrets(self, tenant: str) -> tuple[SigningSecret, ...]:
        """Return the secrets for the webhook URLs of a tenant's jobs, the current one first."""
        return _SECRETS.validate_json(await self._account_wire(tenant))

    async def rotate_account_secrets(self, tenant: str) -> tuple[SigningSecret, ...]:
        """Replace the current one of these secrets, and return them."""
        for _ in range(MAX_CHANGES):
            before = await self._account_wire(tenant)
            secrets = rotate_secrets(_SECRETS.validate_json(before), now_ms())
            if await self._replace(tenant, _ACCOUNT, before, _wire(secrets)):
                return secrets
        raise _changed_meanwhile()

    async def _endpoint_wire(self, tenant: str, endpoint_id: str) -> str:
        with translated():
            wire: str | None = await self._redis.hget(self._keys.webhook_endpoints(tenant), endpoint_id)
        if wire is None or not endpoint_id.startswith("we_") or _endpoint(endpoint_id, wire).has_expired(now_ms()):
            raise _no_endpoint(endpoint_id)
        return wire

    async def _account_wire(self, tenant: str) -> str:
        name = self._keys.webhook_endpoints(tenant)
        with translated():
            await self._redis.hsetnx(name, _ACCOUNT, _wire((SigningSecret(secret=new_secret()),)))
            wire: str = await self._redis.hget(name, _ACCOUNT)
        return wire

    async def _replace(self, tenant: str, field: str, before: str, after: str) -> bool:
        """Store `after` for a field if it still has the value `before`, and return whether it has."""
        return await self._put(tenant, field, before, after) == "ok"

    async def _put(
        self, tenant: str, field: str, before: str | None, after: str | None
    ) -> Literal["ok", "none", "changed", "full"]:
        """Replace the JSON `before`, None for a new endpoint, or delete any; `changed`: another one is stored.

        With it those are deleted that have expired.
        """
        name = self._keys.webhook_endpoints(tenant)

        async def attempt(transaction: Transaction) -> Literal["ok", "none", "changed", "full"]:
            found = paired((await transaction.read(("HGETALL", name)))[0])
            endpoints = unexpired(found, transaction.now_ms)
            stored = endpoints.pop(field, None)
            if after is None:
                if stored is None:
                    return "none"
            elif stored == after:
                return "ok"  # repeated
            elif stored != before:
                return "changed" if stored is not None else "none"
            else:
                if stored is None and sum(one.startswith("we_") for one in endpoints) >= MAX_ENDPOINTS:
                    return "full"
                endpoints[field] = after
            write_endpoints(transaction, name, found, endpoints)
            return "ok"

        return await self._transact(attempt)

    async def expand_outbox(self, limit: int = 100) -> int:
        """Convert up to `limit` outbox entries into about 100 deliveries, and return the number of entries."""

        async def attempt(transaction: Transaction) -> int:
            return await deliveries.expand_outbox(transaction, self._keys, limit)

        return await self._transact(attempt, when_full=True)

    async def claim_deliveries(
        self, slots: int, per_host: int, running: Mapping[tuple[str, str], int], again_ms: int
    ) -> list[DueDelivery]:
        """Claim due deliveries for a sender with `slots`, of which `running` are in use by tenant and host.

        At most `per_host` of a tenant's host, in turns of tenants: one takes a slot while it holds fewer than are free.
        A delivery is due again after `again_ms` unless `record_attempt` follows.
        """

        async def attempt(transaction: Transaction) -> list[ClaimedDelivery]:
            return await deliveries.claim(transaction, self._keys, slots, per_host, running, again_ms)

        due = []
        for delivery_id, fields, wire in await self._transact(attempt, when_full=True):
            delivery = _delivery(delivery_id, fields)
            if delivery.endpoint == "job":
                secrets = _SECRETS.validate_json(wire) if wire else await self.account_secrets(delivery.tenant)
                due.append(DueDelivery(delivery, secrets))
            else:
                endpoint = _endpoint(delivery.endpoint, wire) if wire else None
                is_used = endpoint is not None and endpoint.enabled and not endpoint.has_expired(now_ms())
                due.append(DueDelivery(delivery, endpoint.secrets if endpoint is not None and is_used else ()))
        return due

    async def record_attempt(self, delivery_id: str, outcome: AttemptOutcome, attempt: DeliveryAttempt) -> bool:
        """Record an attempt; disables an endpoint that is gone or has failed for `DISABLED_AFTER_S`."""
        logged, disable_after_ms = attempt.model_dump(exclude_none=True), DISABLED_AFTER_S * 1000

        async def record(transaction: Transaction) -> bool:
            return await deliveries.record(transaction, self._keys, delivery_id, outcome, logged, disable_after_ms)

        return await self._transact(record, when_full=True)

    async def deliveries(
        self, tenant: str, filters: DeliveryFilters = ALL_DELIVERIES, *, after: str | None = None, limit: int = 50
    ) -> tuple[list[WebhookDelivery], str | None]:
        """Return up to `limit` recent deliveries of a tenant, and the cursor `after` of the next page, if any.

        At most `MAX_SCANNED` are read: with filters a page can be short although there are more.
        """
        index, found, cursor = self._keys.webhook_deliveries(tenant), list[WebhookDelivery](), after
        size = SCAN_PAGE_SIZE if filters.select else min(limit, SCAN_PAGE_SIZE)
        for _ in range(0, MAX_SCANNED, SCAN_PAGE_SIZE):
            with translated():
                page, cursor = await page_after(self._redis, index, cursor, size, newest_first=filters.newest_first)
            rows = await self._hashes(self._keys.webhook_delivery(delivery_id) for delivery_id, _ in page)
            for at, ((delivery_id, position), fields) in enumerate(zip(page, rows, strict=True), 1):
                if fields and filters.match(delivery := _delivery(delivery_id, fields)):
                    found.append(delivery)
                    if len(found) == limit:
                        return found, position if at < len(page) else cursor
            if cursor is None:
                break
        return found, cursor

    async def delivery(self, tenant: str, delivery_id: str) -> WebhookDelivery:
        """Return one delivery of a tenant, or raise `NotFound`."""
        (fields,) = await self._hashes([self._keys.webhook_delivery(delivery_id)])
        if fields.get("tenant") != tenant:
            raise _no_delivery(delivery_id)
        return _delivery(delivery_id, fields)

    async def redeliver(self, tenant: str, delivery_id: str) -> None:
        """Attempt a delivery again with the same message id; raises `NotFound`."""
        name = self._keys.webhook_delivery(delivery_id)

        async def attempt(transaction: Transaction) -> bool:
            ((owner, host),) = await transaction.read(("HMGET", name, "tenant", "host"))
            if owner != tenant:
                return False
            transaction.write("HSET", name, "state", "pending", "attempts", 0)
            transaction.write("ZADD", self._keys.webhook_due(tenant, host), transaction.now_ms, delivery_id)
            deliveries.index_hosts(transaction, self._keys, [(tenant, host)])
            return True

        if not await self._transact(attempt):
            raise _no_delivery(delivery_id)

    async def send_test(self, tenant: str, endpoint: WebhookEndpoint, event_id: str) -> str:
        """Send an empty test event, and return its delivery id."""
        delivery_id = f"{event_id}.{endpoint.id}"
        event = (delivery_id, event_id, tenant, endpoint.id, endpoint.url, "", "webhook.test")

        async def attempt(transaction: Transaction) -> None:
            at_ms = await transaction.time_ms()
            await deliveries.create(transaction, self._keys, [NewDelivery(*event, at_ms)])

        await self._transact(attempt)
        return delivery_id


def _no_delivery(delivery_id: str) -> NotFound:
    return NotFound(f"no such delivery: {delivery_id[:64]}", param="id")


def _no_endpoint(endpoint_id: str) -> NotFound:
    return NotFound(f"no such webhook endpoint: {endpoint_id[:64]}", param="id")


def _changed_meanwhile() -> Conflict:
    return Conflict(f"other requests changed this {MAX_CHANGES} times meanwhile; send the request again")


def _stored(endpoint: WebhookEndpoint) -> str:
    return endpoint.model_dump_json(exclude={"id"}, exclude_none=True)


def _endpoint(endpoint_id: str, wire: str) -> WebhookEndpoint:
    return WebhookEndpoint.model_validate({**json.loads(wire), "id": endpoint_id})


def _wire(secrets: tuple[SigningSecret, ...]) -> str:
    return _SECRETS.dump_json(secrets, exclude_none=True).decode()


def _delivery(delivery_id: str, fields: Mapping[str, str]) -> WebhookDelivery:
    return WebhookDelivery.model_validate({**fields, "id": delivery_id})
