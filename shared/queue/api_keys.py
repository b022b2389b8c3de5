"""API keys and tenant limits in Redis."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial

from shared.auth import (
    MAX_NAME_CHARS,
    ApiKey,
    Footprint,
    Identity,
    Rate,
    Scope,
    Spent,
    TenantLimits,
    TenantUse,
    digest_of,
    id_of,
    new_token,
    tenant_name,
)
from shared.errors import Conflict, InvalidRequest
from shared.queue.client import QueueComponent
from shared.queue.connections.errors import translated
from shared.queue.records import paired
from shared.queue.transactions import Command, Transaction

MAX_KEYS = 10_000
KEPT_MS = 30 * 86_400_000
"""Of revoked and expired keys, for operators."""

_OLDEST_READ = 1000
_USE_NOTED_MS = 60_000
MAX_LIMITED_TENANTS = 10_000
MAX_LIMIT = 10**15
USAGE_HALF_LIFE_S = 300
_LIMITS = tuple(TenantLimits.__dataclass_fields__)
_IDENTITY_LIMITS = _LIMITS[:3]
_KEPT = tuple(Footprint.__dataclass_fields__)
_EVERYONE = "*"
_FOOTPRINT_PAGE = 1000


class ApiKeys(QueueComponent):
    async def create(
        self, tenant: str, scopes: frozenset[Scope], *, name: str = "", lives_s: int | None = None
    ) -> tuple[str, ApiKey]:
        """Create a key of a tenant; return the key, which is not stored, and its record.

        From the first key of a namespace on, its APIs require keys. Raises `Conflict` at `MAX_KEYS`.
        """
        tenant_name(tenant)
        if len(name) > MAX_NAME_CHARS or not name.isprintable():
            raise InvalidRequest(f"name: at most {MAX_NAME_CHARS} printable characters", param="name")
        token = new_token()
        key_id = id_of(token) or ""
        lives_ms = None if lives_s is None else lives_s * 1000
        scope_names = ",".join(sorted(scopes))
        row, index = self._keys.api_key(key_id), self._keys.api_keys
        fields = ("digest", digest_of(token), "tenant", tenant, "scopes", scope_names, "name", name)

        async def attempt(transaction: Transaction) -> int:
            (count,) = await transaction.read(("ZCARD", index))
            deleted = await self._deleted(transaction) if count >= MAX_KEYS else []
            if count - len(deleted) >= MAX_KEYS:
                raise Conflict(f"too many: {MAX_KEYS} keys; revoked and expired ones are deleted after 30 days")
            now = await transaction.time_ms()
            transaction.write("HSET", row, *fields, "created", now)
            if lives_ms is not None:
                transaction.write("HSET", row, "expires", now + lives_ms)
                transaction.write("PEXPIRE", row, lives_ms + KEPT_MS)
            transaction.write("ZADD", index, now, key_id)
            transaction.write("SET", self._keys.keys_created, "keys")
            if deleted:
                transaction.write("ZREM", index, *deleted)
            return now

        at = await self._transact(attempt)
        return token, ApiKey(key_id, tenant, scopes, name, at, None if lives_ms is None else at + lives_ms)

    async def _deleted(self, transaction: Transaction) -> list[str]:
        """Return the deleted ones of the oldest keys, which are the most likely to have expired."""
        (ids,) = await transaction.read(("ZRANGE", self._keys.api_keys, 0, _OLDEST_READ - 1), fenced=False)
        exist = await transaction.read(*(("EXISTS", self._keys.api_key(one)) for one in ids), fenced=False)
        return [one for one, exists in zip(ids, exist, strict=True) if not exists]

    async def all(self) -> list[ApiKey]:
        """Return all keys, oldest first, including those revoked or expired within 30 days."""
        with translated():
            ids = await self._redis.zrange(self._keys.api_keys, 0, MAX_KEYS - 1)
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.time()
                for key_id in ids:
                    pipe.hgetall(self._keys.api_key(key_id))
                (seconds, _), *rows = await pipe.execute()
            keys = [
                (key_id, _api_key(key_id, fields, seconds * 1000)) for key_id, fields in zip(ids, rows, strict=True)
            ]
            deleted = [key_id for key_id, key in keys if key is None]
            if deleted:
                await self._redis.zrem(self._keys.api_keys, *deleted)
        return [key for _, key in keys if key is not None]

    async def revoke(self, key_id: str) -> bool:
        """Revoke a key, effective within two seconds; False if there is none."""
        name = self._keys.api_key(key_id)

        async def attempt(transaction: Transaction) -> bool:
            (known,) = await transaction.read(("EXISTS", name))
            if known:
                transaction.write("HSETNX", name, "revoked", transaction.now_ms)
                transaction.write("PEXPIRE", name, KEPT_MS)
            return bool(known)

        return await self._transact(attempt, when_full=True)

    async def identify(self, key_id: str | None, default_tenant: str) -> Identity:
        """Return a key and its tenant's limits; without a key those of `default_tenant`."""
        transaction = Transaction(self._client)
        any_created, fields, limits = await transaction.read(
            ("EXISTS", self._keys.keys_created),
            ("HGETALL", self._keys.api_key(key_id or "")),
            self._identity_limits(default_tenant),
        )
        key = _api_key(key_id or "", paired(fields), transaction.now_ms)
        if key is not None and key.tenant != default_tenant:
            (limits,) = await transaction.read(self._identity_limits(key.tenant))
        found = {name: limit or "" for name, limit in zip(_IDENTITY_LIMITS, limits, strict=True)}
        return Identity(bool(any_created), key, _limits(found))

    def _identity_limits(self, tenant: str) -> Command:
        return ("HMGET", self._keys.tenant_limits, *(f"{tenant}|{name}" for name in _IDENTITY_LIMITS))

    async def note_use(self, key_id: str) -> None:
        """Record a key's use, at most once a minute."""
        name = self._keys.api_key(key_id)

        async def attempt(transaction: Transaction) -> None:
            ((digest, used),) = await transaction.read(("HMGET", name, "digest", "used"))
            if digest and transaction.now_ms - int(used or 0) >= _USE_NOTED_MS:
                transaction.write("HSET", name, "used", transaction.now_ms)

        await self._transact(attempt, when_full=True)

    async def admit(self, tenant: str, requests_per_minute: int) -> Rate:
        """Count a request of a tenant, if its limit allows it; the limit is shared by all API processes."""
        allowed, remaining, reset_ms, retry_ms = await self._scripts.admit(tenant, requests_per_minute)
        return Rate(bool(allowed), requests_per_minute, int(remaining), int(reset_ms), int(retry_ms))

    async def any_created(self) -> bool:
        """Return whether a key has ever been created."""
        with translated():
            return bool(await self._redis.exists(self._keys.keys_created))

    async def url_secret(self) -> bytes:
        """Return the namespace's secret for signed URLs; the first call creates it."""
        with translated():
            known = await self._redis.get(self._keys.url_secret)
            if known is None:
                await self._redis.set(self._keys.url_secret, secrets.token_hex(32), nx=True)
                known = await self._redis.get(self._keys.url_secret)
            return bytes.fromhex(known)

    async def tenant_limits(self) -> dict[str, TenantLimits]:
        """Return the limits of tenants that differ from the settings."""
        with translated():
            rows = await self._redis.hgetall(self._keys.tenant_limits)
        tenants = sorted({field.partition("|")[0] for field in rows})
        return {tenant: _limits({name: rows.get(f"{tenant}|{name}", "") for name in _LIMITS}) for tenant in tenants}

    async def footprints(self) -> dict[str, Footprint]:
        """Return what each tenant keeps."""
        rows: dict[str, str] = {}
        with translated():
            async for field, value in self._redis.hscan_iter(self._keys.footprint, count=_FOOTPRINT_PAGE):
                rows[field] = value
        tenants = sorted({field.partition("|")[0] for field in rows} - {_EVERYONE})
        return {tenant: _footprint([rows.get(f"{tenant}|{name}") for name in _KEPT]) for tenant in tenants}

    async def footprint(self, tenant: str = _EVERYONE) -> Footprint:
        """Return what a tenant keeps; by default all of them together."""
        with translated():
            return _footprint(await self._redis.hmget(self._keys.footprint, [f"{tenant}|{name}" for name in _KEPT]))

    async def tenant_use(self) -> dict[str, TenantUse]:
        """Return how much the tenants of the last hours use the devices."""
        with translated():
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.time()
                pipe.hgetall(self._keys.running_slots)
                pipe.zrange(self._keys.gpu_usage, 0, MAX_LIMITED_TENANTS - 1, desc=True, withscores=True)
                (now_s, _), running, usage = await pipe.execute()
        seconds = {tenant: 2.0 ** min(64.0, log2 - now_s / USAGE_HALF_LIFE_S) for tenant, log2 in usage}
        return {
            tenant: TenantUse(int(running.get(tenant, 0)), round(seconds.get(tenant, 0.0), 3))
            for tenant in sorted(running.keys() | seconds.keys())
        }

    async def spent(self) -> dict[str, Spent]:
        """Return how much device time each tenant has used in the present day and month."""
        with translated():
            seconds, _ = await self._redis.time()
            async with self._redis.pipeline(transaction=False) as pipe:
                for period, number in present_periods(seconds).items():
                    pipe.hgetall(self._keys.spent(period, str(number)))
                of_day, of_month = await pipe.execute()
        return {
            tenant: Spent(*(round(int(rows.get(tenant, 0)) / 1e6, 3) for rows in (of_day, of_month)))
            for tenant in of_day.keys() | of_month.keys()
        }

    async def queued_jobs(self, tenants: Sequence[str]) -> dict[str, int]:
        """Return how many jobs of each of these tenants are queued, as their limit counts them: paused ones too, and
        those for later."""
        if not tenants:
            return {}
        sets = (self._keys.paused_jobs, self._keys.later_jobs)
        outside = [("SCARD", jobs_of(tenant)) for tenant in tenants for jobs_of in sets]
        in_lanes, *others = await self._replies([("HMGET", self._keys.queued_jobs, *tenants), *outside])
        counts = zip(tenants, in_lanes, others[::2], others[1::2], strict=True)
        return {tenant: int(in_lane or 0) + int(paused) + int(later) for tenant, in_lane, paused, later in counts}

    async def set_limits(self, tenant: str, limits: TenantLimits) -> None:
        """Replace a tenant's limits; None means the limit in the settings. They count for the next claim."""
        await self.change_limits(tenant, asdict(limits))

    async def change_limits(self, tenant: str, changes: Mapping[str, int | None]) -> TenantLimits:
        """Change some of a tenant's limits, as `set_limits` does all, and return all that are its own now."""
        tenant_name(tenant)
        for name, value in changes.items():
            if value is not None and not 1 <= value <= MAX_LIMIT:
                raise InvalidRequest(f"{name}: {value}; it must be from 1 to 10^15", param=name)
        known = await self.tenant_limits()
        if tenant not in known and len(known) >= MAX_LIMITED_TENANTS:
            raise Conflict(f"too many limited tenants: {MAX_LIMITED_TENANTS}; change the settings instead")
        await self._transact(partial(self._write_limits, tenant, changes), when_full=True)
        return (await self.tenant_limits()).get(tenant, TenantLimits())

    async def _write_limits(self, tenant: str, values: Mapping[str, int | None], transaction: Transaction) -> None:
        """Write limits, and wake workers for what the old ones held back."""
        for name, value in values.items():
            row = (self._keys.tenant_limits, f"{tenant}|{name}")
            if value is None:
                transaction.write("HDEL", *row)
            else:
                transaction.write("HSET", *row, value)
        transaction.call("resume_tenant", tenant)


def _api_key(key_id: str, fields: Mapping[str, str], now_ms: int | None) -> ApiKey | None:
    if not fields.get("digest"):
        return None
    known = frozenset(Scope)
    expires = _number(fields.get("expires", ""))
    return ApiKey(
        id=key_id,
        tenant=fields["tenant"],
        scopes=frozenset(Scope(word) for word in fields["scopes"].split(",") if word in known),
        name=fields.get("name", ""),
        created_at_ms=int(fields["created"]),
        expires_at_ms=expires,
        last_used_at_ms=_number(fields.get("used", "")),
        revoked_at_ms=_number(fields.get("revoked", "")),
        expired=now_ms is not None and expires is not None and expires <= now_ms,
        digest=fields["digest"],
    )


def _limits(rows: Mapping[str, str]) -> TenantLimits:
    return TenantLimits(**{name: _number(rows.get(name, "")) for name in _LIMITS})


def _footprint(values: Sequence[str | None]) -> Footprint:
    return Footprint(*(int(value or 0) for value in values))


def present_periods(now_s: int) -> dict[str, int]:
    """Return the numbers of the present day and month, as in `spending.lua`: months since March of year 0."""
    today = datetime.fromtimestamp(now_s, UTC)
    return {"day": now_s // 86_400, "month": 12 * today.year + today.month - 3}


def _number(text: str) -> int | None:
    return int(text) if text else None
