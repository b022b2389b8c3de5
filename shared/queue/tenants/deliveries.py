"""Deliveries of webhooks: created from the outbox of events, claimed in turns, attempted until they end.

The functions are attempts of transactions.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shared.queue.records import paired
from shared.queue.redis_keys import RedisKeys
from shared.queue.tenants.endpoints import enabled, unexpired, write_endpoints
from shared.queue.transactions import Transaction
from shared.webhooks import AttemptOutcome, DeliveryState

DELIVERY_MS = 7 * 86_400_000
KEPT = 50_000
"""Deliveries of a tenant: with their keys about 40 MB."""

WORK = 100
"""Deliveries that one conversion of the outbox creates; an entry is converted completely, with at most 17."""

MAX_TENANTS, MAX_HOSTS = 128, 32
"""More than can have deliveries in progress, so that these hide no others."""

MAX_LOGGED = 20
_ENDPOINT_READ = 0.1  # of the work for a delivery
_OUTBOXES_READ = 8

Host = tuple[str, str]
"""A tenant and the host of its URLs."""


class NewDelivery(NamedTuple):
    """A delivery to be created; `at_ms`: when its event happened."""

    id: str
    event_id: str
    tenant: str
    endpoint: str
    url: str
    job_id: str
    type: str
    at_ms: int

    @property
    def host(self) -> str:
        _, separator, rest = self.url.partition("://")
        return min((rest.split(mark, 1)[0] for mark in "/?#"), key=len) if separator else self.url


class ClaimedDelivery(NamedTuple):
    """A delivery, and its endpoint or the account as JSON, empty if it is gone."""

    id: str
    fields: Mapping[str, str]
    wire: str


async def create(transaction: Transaction, keys: RedisKeys, deliveries: Sequence[NewDelivery]) -> None:
    """Create deliveries that are due now, unless they exist. Beyond `KEPT` a tenant's oldest are dropped."""
    known = await transaction.read(*(("EXISTS", keys.webhook_delivery(one.id)) for one in deliveries))
    new = [one for one, exists in zip(deliveries, known, strict=True) if not exists]
    now = transaction.now_ms
    for one in new:
        name, log = keys.webhook_delivery(one.id), keys.webhook_deliveries(one.tenant)
        row = {"event_id": one.event_id, "tenant": one.tenant, "endpoint": one.endpoint, "url": one.url}
        row |= {"host": one.host, "job_id": one.job_id, "type": one.type, "at_ms": str(one.at_ms), "state": "pending"}
        transaction.write("HSET", name, *_flat({**row, "attempts": "0"}))
        transaction.write("PEXPIRE", name, DELIVERY_MS)
        transaction.write("ZADD", log, now, one.id)
        transaction.write("PEXPIRE", log, DELIVERY_MS)
        transaction.write("ZADD", keys.webhook_due(one.tenant, one.host), now, one.id)
    dropped = await _drop_oldest(transaction, keys, Counter(one.tenant for one in new))
    index_hosts(transaction, keys, [*((one.tenant, one.host) for one in new), *dropped])


async def _drop_oldest(transaction: Transaction, keys: RedisKeys, created: Counter[str]) -> list[Host]:
    """Drop up to two deliveries for each new one of a tenant above `KEPT`, pending or not; return their hosts."""
    logs = [keys.webhook_deliveries(tenant) for tenant in created]
    kept = await transaction.read(*(("ZCARD", log) for log in logs), fenced=False)
    dropped = []
    for (tenant, count), log, before in zip(created.items(), logs, kept, strict=True):
        excess = min(before + count - KEPT, 2 * count)
        (ids,) = await transaction.read(("ZRANGE", log, 0, excess - 1), fenced=False) if excess > 0 else ([],)
        hosts = await transaction.read(*(("HGET", keys.webhook_delivery(one), "host") for one in ids), fenced=False)
        for one, host in zip(ids, hosts, strict=True):
            if host:
                transaction.write("ZREM", keys.webhook_due(tenant, host), one)
                dropped.append((tenant, host))
            transaction.write("DEL", keys.webhook_delivery(one))
            transaction.write("ZREM", log, one)
    return dropped


def index_hosts(transaction: Transaction, keys: RedisKeys, hosts: Iterable[Host]) -> None:
    """Index hosts and their tenants by their earliest deliveries."""
    for tenant, host in dict.fromkeys(hosts):
        transaction.call("index_first", keys.webhook_hosts(tenant), host, keys.webhook_due(tenant, host))
        transaction.call("index_first", keys.webhook_tenants, tenant, keys.webhook_hosts(tenant))


# From the outbox


async def expand_outbox(transaction: Transaction, keys: RedisKeys, limit: int) -> int:
    """Convert outbox entries into deliveries: one per subscribed endpoint, and one for the job's own URL.

    Tenants take turns: one with unconverted entries goes behind the others.
    """
    (tenants,) = await transaction.read(("ZRANGE", keys.outbox_tenants, 0, WORK), fenced=False)
    created: list[NewDelivery] = []
    work, done = 0.0, 0
    for first in range(0, len(tenants), _OUTBOXES_READ):
        chunk = tenants[first : first + _OUTBOXES_READ]
        endpoints = await transaction.read(*(("HGETALL", keys.webhook_endpoints(tenant)) for tenant in chunk))
        entries = [("XRANGE", keys.webhook_outbox(tenant), "-", "+", "COUNT", limit - done) for tenant in chunk]
        found = await transaction.read(*entries, fenced=False)
        for tenant, fields, rows in zip(chunk, endpoints, found, strict=True):
            if work >= WORK or done >= limit:
                break
            stored = paired(fields)
            usable = unexpired(stored, transaction.now_ms)
            if len(usable) < len(stored):
                write_endpoints(transaction, keys.webhook_endpoints(tenant), stored, usable)
            of_tenant = enabled(usable)
            work += 1 + _ENDPOINT_READ * len(of_tenant)
            current = await _current_entries(transaction, keys, tenant, rows[: limit - done])
            converted = []
            for entry, values in current:
                if work >= WORK:
                    break
                new = list(_deliveries(tenant, paired(values), of_tenant))
                work += len(new)
                created += new
                converted.append(entry)
            done += len(converted)
            _end_turn(transaction, keys, tenant, converted)
        if work >= WORK or done >= limit:
            break
    await create(transaction, keys, created)
    return done


def _deliveries(
    tenant: str, entry: Mapping[str, str], endpoints: Sequence[tuple[str, Mapping[str, Any]]]
) -> Iterator[NewDelivery]:
    event, state = entry["event"], entry["state"]
    kind = state if "." in state else f"job.{state}"  # a batch's has its prefix
    urls = [(name, one["url"]) for name, one in endpoints if state in one["states"]]
    if entry["url"]:
        urls.append(("job", entry["url"]))
    for name, url in urls:
        at_ms = int(event.partition("-")[0])
        yield NewDelivery(f"{event}.{name}", event, tenant, name, url, entry["job"], kind, at_ms)


async def _current_entries(
    transaction: Transaction, keys: RedisKeys, tenant: str, rows: Sequence[tuple[str, Sequence[str]]]
) -> list[tuple[str, Sequence[str]]]:
    """Return entries of an outbox, read again without those that another process has converted."""
    if not rows:
        return []
    (found,) = await transaction.read(("XRANGE", keys.webhook_outbox(tenant), rows[0][0], rows[-1][0]))
    return [(entry, values) for entry, values in found]


def _end_turn(transaction: Transaction, keys: RedisKeys, tenant: str, converted: Sequence[str]) -> None:
    """Remove the entries that are converted."""
    outbox = keys.webhook_outbox(tenant)
    if converted:
        transaction.write("XDEL", outbox, *converted)
    transaction.call("end_outbox_turn", outbox, keys.outbox_tenants, tenant, transaction.now_ms + 1)


# Claims and attempts


@dataclass
class _Turn:
    """A tenant with due deliveries: how many are in progress, its hosts, and due deliveries of the first of them."""

    tenant: str
    running: int
    hosts: list[str]
    due: list[tuple[str, str]] = field(default_factory=list)


async def claim(
    transaction: Transaction, keys: RedisKeys, slots: int, per_host: int, running: Mapping[Host, int], again_ms: int
) -> list[ClaimedDelivery]:
    """Claim due deliveries. The tenant with the fewest in progress goes first, and takes a slot while it holds fewer
    than are free; each delivery is due again later in case its sender is killed."""
    turns, free = await _due_tenants(transaction, keys, running), slots - sum(running.values())
    chosen: list[tuple[str, str, str]] = []
    while turns:
        await _read_due(transaction, keys, turns, per_host, running)
        left = []
        for turn in turns:
            if turn.due and turn.running < free:
                host, delivery_id = turn.due.pop(0)
                chosen.append((delivery_id, turn.tenant, host))
                turn.running, free = turn.running + 1, free - 1
                left.append(turn)
        turns = left
    return await _claim_chosen(transaction, keys, chosen, again_ms)


async def _due_tenants(transaction: Transaction, keys: RedisKeys, running: Mapping[Host, int]) -> list[_Turn]:
    (first,) = await transaction.read(("ZRANGE", keys.webhook_tenants, 0, MAX_TENANTS - 1, "WITHSCORES"), fenced=False)
    tenants = _until(first, transaction.now_ms)
    names = (("ZRANGE", keys.webhook_hosts(tenant), 0, MAX_HOSTS - 1, "WITHSCORES") for tenant in tenants)
    hosts = await transaction.read(*names, fenced=False)
    by_tenant: Counter[str] = Counter()
    for (tenant, _), count in running.items():
        by_tenant[tenant] += count
    turns = [
        _Turn(tenant, by_tenant[tenant], _until(rows, transaction.now_ms))
        for tenant, rows in zip(tenants, hosts, strict=True)
    ]
    return sorted(turns, key=lambda turn: turn.running)


async def _read_due(
    transaction: Transaction, keys: RedisKeys, turns: Sequence[_Turn], per_host: int, running: Mapping[Host, int]
) -> None:
    """Read the due deliveries of the next host of each turn that has none left."""
    while True:
        hosts = []
        for turn in turns:
            while turn.hosts and not turn.due:
                host = turn.hosts.pop(0)
                room = per_host - running.get((turn.tenant, host), 0)
                if room > 0:
                    hosts.append((turn, host, room))
                    break
        if not hosts:
            return
        names = (
            ("ZRANGE", keys.webhook_due(turn.tenant, host), 0, room - 1, "WITHSCORES") for turn, host, room in hosts
        )
        for (turn, host, _), rows in zip(hosts, await transaction.read(*names, fenced=False), strict=True):
            turn.due = [(host, delivery_id) for delivery_id in _until(rows, transaction.now_ms)]


async def _claim_chosen(
    transaction: Transaction, keys: RedisKeys, chosen: Sequence[tuple[str, str, str]], again_ms: int
) -> list[ClaimedDelivery]:
    places = (("ZSCORE", keys.webhook_due(tenant, host), one) for one, tenant, host in chosen)
    scores = await transaction.read(*places)
    # Another process can have claimed or ended one since it was chosen.
    due_ms = zip(chosen, scores, strict=True)
    chosen = [one for one, score in due_ms if score is not None and float(score) <= transaction.now_ms]
    names = [keys.webhook_delivery(delivery_id) for delivery_id, _, _ in chosen]
    dues = [keys.webhook_due(tenant, host) for _, tenant, host in chosen]
    rows = list(map(paired, await transaction.read(*(("HGETALL", name) for name in names), fenced=False)))
    known = [(one, row) for (one, _, _), row in zip(chosen, rows, strict=True) if row]
    wires = await transaction.read(
        *(("HGET", keys.webhook_endpoints(row["tenant"]), _field_of(row["endpoint"])) for _, row in known), fenced=False
    )
    for (delivery_id, _, _), due, row in zip(chosen, dues, rows, strict=True):
        if row:
            transaction.write("ZADD", due, transaction.now_ms + again_ms, delivery_id)
        else:
            transaction.write("ZREM", due, delivery_id)
    index_hosts(transaction, keys, ((tenant, host) for _, tenant, host in chosen))
    return [ClaimedDelivery(one, row, wire or "") for (one, row), wire in zip(known, wires, strict=True)]


async def record(
    transaction: Transaction,
    keys: RedisKeys,
    delivery_id: str,
    outcome: AttemptOutcome,
    attempt: Mapping[str, Any],
    disable_after_ms: int,
) -> bool:
    """Record an attempt; disable an endpoint that is gone or has failed for too long. False for an unknown delivery."""
    name, state = keys.webhook_delivery(delivery_id), outcome.state
    ((tenant, endpoint, host, log),) = await transaction.read(("HMGET", name, "tenant", "endpoint", "host", "log"))
    if tenant is None:
        return False
    entries = [*json.loads(log or "[]"), attempt][-MAX_LOGGED:]
    due = keys.webhook_due(tenant, host)
    transaction.write("HINCRBY", name, "attempts", 1)
    transaction.write("HSET", name, "state", state.value, "log", json.dumps(entries))
    if state is DeliveryState.PENDING:
        at_ms = transaction.now_ms + round((outcome.retry_s or 0) * 1000)
        transaction.write("HSET", name, "next_at_ms", at_ms)
        transaction.write("ZADD", due, at_ms, delivery_id)
    else:
        transaction.write("HDEL", name, "next_at_ms")
        transaction.write("ZREM", due, delivery_id)
    index_hosts(transaction, keys, [(tenant, host)])
    if endpoint != "job":
        await _record_failing(transaction, keys.webhook_endpoints(tenant), endpoint, outcome, disable_after_ms)
    return True


async def _record_failing(
    transaction: Transaction, name: str, endpoint_id: str, outcome: AttemptOutcome, disable_after_ms: int
) -> None:
    """Record since when an endpoint fails, and disable it after too long."""
    (wire,) = await transaction.read(("HGET", name, endpoint_id))
    if wire is None:
        return
    endpoint, now = json.loads(wire), transaction.now_ms
    since = endpoint.pop("failing_since", None)
    if outcome.state is not DeliveryState.DELIVERED:
        endpoint["failing_since"] = since or now
        failed_long = now - endpoint["failing_since"] > disable_after_ms
        if outcome.gone or failed_long:
            reason = "the endpoint responded with 410 Gone" if outcome.gone else "the endpoint has failed for too long"
            endpoint |= {"enabled": False, "disabled_reason": reason}
    elif since is None:
        return
    (fields,) = await transaction.read(("HGETALL", name))
    before = paired(fields)
    write_endpoints(transaction, name, before, {**before, endpoint_id: json.dumps(endpoint)})


def _field_of(endpoint: str) -> str:
    return "account" if endpoint == "job" else endpoint


def _until(rows: Sequence[str], now_ms: int) -> list[str]:
    """Return the members of a sorted set with a score until now, from members and scores."""
    return [member for member, score in zip(rows[::2], rows[1::2], strict=True) if float(score) <= now_ms]


def _flat(row: Mapping[str, str]) -> list[str]:
    return [value for pair in row.items() for value in pair]
