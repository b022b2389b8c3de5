"""API keys, signed URLs and rate limits. Keys are cached for two seconds, so most requests skip Redis."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import TypeAlias

from cachetools import LRUCache

from api.keys_required import KeysRequired
from shared.auth import DEFAULT_TENANT, PREFIX, ApiKey, Identity, Rate, Scope, Signer, TenantLimits, id_of
from shared.config.settings import Settings
from shared.errors import (
    ExpiredApiKey,
    InvalidApiKey,
    PermissionDenied,
    StorageUnavailable,
    Unauthenticated,
    Unavailable,
)
from shared.queue import Queue
from shared.runtime.clock import now_ms
from shared.runtime.shares import SharedPool, SharedTurns

CACHE_S = 2.0
"""Lifetime of a cached key: how soon a revoked key is refused, and keys are required once the first one exists."""

MAX_CACHED_KEYS = 10_000
UNKNOWN_READS = 8
"""Reads of Redis at once for requests without a known key; a process has 32 connections."""

MAX_UNKNOWN_PER_ADDRESS = 64
UNKNOWN_WAIT_S = 5.0
SIGNER_S = 60.0
USE_RECORDED_EVERY_MS = 60_000
SCHEMES = ("bearer", "key", "token")
_KEYS_UNKNOWN = "storage: whether API keys are required is unknown until it responds"

_CacheKey: TypeAlias = tuple[str | None, str]  # id of the key, tenant of a request without one


@dataclass(frozen=True)
class Caller:
    """Tenant, scopes and limits of a request; `scopes` is None where no keys are required."""

    tenant: str
    scopes: frozenset[Scope] | None
    limits: TenantLimits
    key_id: str | None = None

    @property
    def has_key(self) -> bool:
        return self.scopes is not None

    def require(self, *enough: Scope) -> None:
        """Raise `PermissionDenied` unless the key has one of the scopes."""
        if self.scopes is not None and self.scopes.isdisjoint(enough):
            scopes = ", ".join(sorted(self.scopes)) or "none"
            raise PermissionDenied(f"this needs a key with the scope {' or '.join(enough)}; this one has {scopes}")

    def require_for(self, tenant: str | None, scope: Scope) -> None:
        """Raise `PermissionDenied` unless the key has `scope`, or the scope `admin` where a request names a tenant."""
        if tenant is not None:
            self.require(Scope.ADMIN)
        elif self.scopes is not None and scope not in self.scopes and Scope.ADMIN in self.scopes:
            raise PermissionDenied(f"this needs a key with the scope {scope}; as an operator name a tenant in `tenant`")
        else:
            self.require(scope)


class Authenticator:
    """Returns the caller of an Authorization header; caches a bounded number of keys."""

    def __init__(self, queue: Queue, settings: Settings, keys_required: KeysRequired) -> None:
        self._queue = queue
        self._keys_required = keys_required
        self._settings = settings
        self._cache: LRUCache[_CacheKey, tuple[float, Identity]] = LRUCache(MAX_CACHED_KEYS)
        self._reading: dict[_CacheKey, asyncio.Task[Identity]] = {}
        self._signer: tuple[float, Signer] | None = None
        self._unknown_callers = SharedTurns(
            SharedPool("unknown_callers", UNKNOWN_READS), max_waiting=MAX_UNKNOWN_PER_ADDRESS, timeout_s=UNKNOWN_WAIT_S
        )

    async def caller(self, authorization: Sequence[str], address: str = "") -> Caller:
        """Return the caller that these Authorization headers authenticate, or raise `Unauthenticated`."""
        if not await self._requires_key():
            return Caller(DEFAULT_TENANT, None, (await self._without_key()).limits)
        try:
            return await self._by_key(authorization, address)
        except Unauthenticated:
            if self._keys_required.known:
                raise
            raise StorageUnavailable(_KEYS_UNKNOWN, public=_KEYS_UNKNOWN) from None

    async def caller_by_url(self, tenant: str) -> Caller:
        """Return the caller of a request by signed URL for a tenant's artifact."""
        limits = (await self._identity(None, tenant)).limits
        return Caller(tenant, frozenset((Scope.JOBS_READ,)), limits)

    def unknown_caller(self, address: str) -> AbstractAsyncContextManager[None]:
        """Return a turn to read Redis for a request that no known key vouches for; raises `Overloaded`."""
        return self._unknown_callers.turn(network_of(address), 1)

    async def _by_key(self, authorization: Sequence[str], address: str) -> Caller:
        token = _token(authorization)
        key_id = id_of(token)
        if key_id is None:
            # The message does not repeat the token.
            mistyped = "the API key is mistyped or cut off: its checksum does not match"
            reason = mistyped if token.startswith(PREFIX) else f"not a key of fusequeue: keys begin with {PREFIX}"
            raise InvalidApiKey(reason, param="Authorization")
        identity = await self._identity_of(key_id, token, address)
        key = identity.key
        if key is None or not key.matches(token):
            raise InvalidApiKey("there is no such API key", param="Authorization")
        if key.revoked_at_ms is not None:
            raise InvalidApiKey(f"the API key {key.prefix} has been revoked", param="Authorization")
        if key.expired:
            raise ExpiredApiKey(f"the API key {key.prefix} has expired", param="Authorization")
        await self._record_use(key, identity)
        return Caller(key.tenant, key.scopes, identity.limits, key.id)

    async def count_request(self, caller: Caller) -> Rate | None:
        """Count one request of the caller's tenant; None where its rate is not limited."""
        limit = caller.limits.requests_per_minute or self._settings.max_requests_per_minute_per_tenant
        return None if limit is None else await self._queue.api_keys.admit(caller.tenant, limit)

    async def signer(self) -> Signer:
        """Return the signer of this namespace's URLs; the secret is read again after a while, as Redis can lose it."""
        if self._signer is None or time.monotonic() - self._signer[0] > SIGNER_S:
            try:
                signer = Signer(await self._queue.api_keys.url_secret(), self._settings.presign_expires_s)
            except Unavailable:
                if self._signer is None:
                    raise
                signer = self._signer[1]
            self._signer = time.monotonic(), signer
        return self._signer[1]

    async def _requires_key(self) -> bool:
        decided = self._keys_required.decided
        if decided is not None:
            return decided
        return (await self._without_key()).keys_made or not self._keys_required.known

    async def _without_key(self) -> Identity:
        """Return the identity of a request without a key.

        An old one will do while Redis is unavailable: no key can be created then.
        """
        cached = self._cache.get((None, DEFAULT_TENANT))
        try:
            return await self._identity(None)
        except Unavailable:
            if cached is None:
                raise
            return cached[1]

    async def _identity_of(self, key_id: str, token: str, address: str) -> Identity:
        """Return the identity of a complete key; one that this process has not seen waits for its share of Redis."""
        cached = self._cache.get((key_id, DEFAULT_TENANT))
        if cached is not None and (_fresh(cached) or (cached[1].key is not None and cached[1].key.matches(token))):
            return await self._identity(key_id)
        async with self.unknown_caller(address):
            return await self._identity(key_id)

    async def _identity(self, key_id: str | None, tenant: str = DEFAULT_TENANT) -> Identity:
        """Return a key and its tenant's limits; without a key those of `tenant`."""
        name = key_id, tenant
        cached = self._cache.get(name)
        if cached is not None and _fresh(cached):
            return cached[1]
        # One read for all requests that wait for it: 200 streams that connect at once would occupy every connection.
        reading = self._reading.get(name)
        if reading is None:
            reading = self._reading[name] = asyncio.create_task(self._read(name))
            reading.add_done_callback(lambda task: self._end_reading(name, task))
        return await asyncio.shield(reading)

    async def _read(self, name: _CacheKey) -> Identity:
        read_at = time.monotonic()
        key_id, tenant = name
        identity = await self._queue.api_keys.identify(key_id, tenant)
        if identity.keys_made:
            self._keys_required.note_created()
        if identity.key is None and key_id is not None:
            self._cache.pop(name, None)
            return identity
        self._cache[name] = (read_at, identity)
        return identity

    def _end_reading(self, name: _CacheKey, task: asyncio.Task[Identity]) -> None:
        del self._reading[name]
        if not task.cancelled():
            task.exception()  # its requests can have been canceled: otherwise asyncio logs that it was never retrieved

    async def _record_use(self, key: ApiKey, identity: Identity) -> None:
        """Record that the key is in use; a failure to record it refuses nothing."""
        now = now_ms()
        if key.last_used_at_ms is not None and now - key.last_used_at_ms < USE_RECORDED_EVERY_MS:
            return
        name = key.id, DEFAULT_TENANT
        cached = self._cache.get(name)
        if cached is not None:
            self._cache[name] = (cached[0], replace(identity, key=replace(key, last_used_at_ms=now)))
        with contextlib.suppress(Unavailable):
            await self._queue.api_keys.note_use(key.id)


def network_of(address: str) -> str:
    """Return the address, or the first half of an IPv6 address: one client has all of the second half."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    return str(parsed.ipv4_mapped or ipaddress.ip_network((parsed, 64), strict=False))


def _fresh(cached: tuple[float, Identity]) -> bool:
    return time.monotonic() - cached[0] < CACHE_S


def _token(authorization: Sequence[str]) -> str:
    if not authorization:
        raise Unauthenticated(
            "no API key: send `Authorization: Bearer fq_...`; `fusequeue keys create` creates one",
            param="Authorization",
        )
    scheme, _, token = authorization[0].strip().partition(" ")
    if len(authorization) > 1 or scheme.lower() not in SCHEMES or not token.strip():
        raise InvalidApiKey("send one header `Authorization: Bearer fq_...` (or Key, or Token)", param="Authorization")
    return token.strip()


def rate_headers(rate: Rate) -> dict[str, str]:
    """Return a tenant's rate limit in the headers of the IETF draft and of OpenAI's clients."""
    seconds = -(-rate.reset_ms // 1000)
    return {
        "RateLimit-Policy": f'"requests";q={rate.limit};w=60',
        "RateLimit": f'"requests";r={rate.remaining};t={seconds}',
        "x-ratelimit-limit-requests": str(rate.limit),
        "x-ratelimit-remaining-requests": str(rate.remaining),
        "x-ratelimit-reset-requests": f"{rate.reset_ms}ms" if rate.reset_ms < 1000 else f"{seconds}s",
    }
