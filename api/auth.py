"""Who asks, and whether the tenant may ask now: the API's side of keys, read from Redis once in two seconds a key."""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from api.signed_urls import Signer
from shared.auth import DEFAULT_TENANT, PREFIX, ApiKey, Identity, Rate, Scope, TenantLimits, id_of
from shared.config.settings import Settings
from shared.errors import ExpiredApiKey, InvalidApiKey, PermissionDenied, Unauthenticated, Unavailable
from shared.queue import Queue
from shared.runtime.clock import now_ms

FRESH_S = 2.0
"""What is known of a key is read again after this: a revoked one is refused, and a first one asked for, as fast."""

MAX_KEPT = 10_000
NOTE_USE_EVERY_MS = 60_000
SCHEMES = ("bearer", "key", "token")


@dataclass(frozen=True)
class Caller:
    """Whose request it is. `scopes` is what the key may do; None where no keys are asked for."""

    tenant: str
    scopes: frozenset[Scope] | None
    limits: TenantLimits

    @property
    def keyed(self) -> bool:
        return self.scopes is not None

    def require(self, scope: Scope) -> None:
        """Raise `PermissionDenied` where the key lacks `scope`."""
        if self.scopes is not None and scope not in self.scopes:
            has = ", ".join(sorted(self.scopes)) or "none"
            raise PermissionDenied(f"this needs a key with the scope {scope.value}; this one has {has}")


class Authenticator:
    """Turns an Authorization header into a caller; keeps a bounded number of keys in mind."""

    def __init__(self, queue: Queue, settings: Settings) -> None:
        self._queue = queue
        self._settings = settings
        self._kept: OrderedDict[str | None, tuple[float, Identity]] = OrderedDict()
        self._signer: Signer | None = None

    async def caller(self, authorization: Sequence[str]) -> Caller:
        """Return whose request it is that came with these Authorization headers, or raise `Unauthenticated`."""
        if not await self._asks_for_keys():
            return Caller(DEFAULT_TENANT, None, (await self._anyone()).limits)
        token = _token(authorization)
        key_id = id_of(token)
        if key_id is None:
            raise InvalidApiKey(_no_key(token), param="Authorization")
        identity = await self._known(key_id)
        key = identity.key
        if key is None or not key.matches(token):
            raise InvalidApiKey("there is no such API key", param="Authorization")
        if key.revoked_at_ms is not None:
            raise InvalidApiKey(f"the API key {key.prefix} has been revoked", param="Authorization")
        if key.expired:
            raise ExpiredApiKey(f"the API key {key.prefix} has expired", param="Authorization")
        await self._note_use(key, identity)
        return Caller(key.tenant, key.scopes, identity.limits)

    async def admit(self, caller: Caller) -> Rate | None:
        """Count one request of the caller's tenant; None where it may ask as often as it likes."""
        limit = caller.limits.requests_per_minute or self._settings.max_requests_per_minute_per_tenant
        return None if limit is None else await self._queue.api_keys.admit(caller.tenant, limit)

    async def signer(self) -> Signer:
        """Return what signs URLs of this namespace."""
        if self._signer is None:
            self._signer = Signer(await self._queue.api_keys.url_secret(), self._settings.presign_expires_s)
        return self._signer

    async def _asks_for_keys(self) -> bool:
        if self._settings.auth != "auto":
            return self._settings.auth == "keys"
        return (await self._anyone()).keys_made

    async def _anyone(self) -> Identity:
        """Return what is known without a key. While Redis is away that is what was known before: no key can be made."""
        kept = self._kept.get(None)
        try:
            return await self._known(None)
        except Unavailable:
            if kept is None:
                raise
            return kept[1]

    async def _known(self, key_id: str | None) -> Identity:
        kept = self._kept.get(key_id)
        if kept is not None and time.monotonic() - kept[0] < FRESH_S:
            return kept[1]
        asked_at = time.monotonic()
        identity = await self._queue.api_keys.identify(key_id, DEFAULT_TENANT)
        if identity.key is not None or key_id is None:
            self._keep(key_id, asked_at, identity)
        else:
            self._kept.pop(key_id, None)
        return identity

    def _keep(self, key_id: str | None, read_at: float, identity: Identity) -> None:
        self._kept[key_id] = (read_at, identity)
        self._kept.move_to_end(key_id)
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)

    async def _note_use(self, key: ApiKey, identity: Identity) -> None:
        """Note that the key is in use; that it cannot be noted is no reason to refuse."""
        now = now_ms()
        if key.last_used_at_ms is not None and now - key.last_used_at_ms < NOTE_USE_EVERY_MS:
            return
        kept = self._kept.get(key.id)
        if kept is not None:
            self._kept[key.id] = (kept[0], replace(identity, key=replace(key, last_used_at_ms=now)))
        with contextlib.suppress(Unavailable):
            await self._queue.api_keys.note_use(key.id)


def rate_headers(rate: Rate) -> dict[str, str]:
    """Return a tenant's limit as the IETF's draft has it, and as OpenAI's clients know it."""
    seconds = -(-rate.reset_ms // 1000)
    return {
        "RateLimit-Policy": f'"requests";q={rate.limit};w=60',
        "RateLimit": f'"requests";r={rate.remaining};t={seconds}',
        "x-ratelimit-limit-requests": str(rate.limit),
        "x-ratelimit-remaining-requests": str(rate.remaining),
        "x-ratelimit-reset-requests": f"{rate.reset_ms}ms" if rate.reset_ms < 1000 else f"{seconds}s",
    }


def _token(authorization: Sequence[str]) -> str:
    if not authorization:
        raise Unauthenticated(
            "this API asks for a key: send `Authorization: Bearer fq_...`; `fusequeue keys create` makes one",
            param="Authorization",
        )
    scheme, _, token = authorization[0].strip().partition(" ")
    if len(authorization) > 1 or scheme.lower() not in SCHEMES or not token.strip():
        raise InvalidApiKey("send one header `Authorization: Bearer fq_...` (or Key, or Token)", param="Authorization")
    return token.strip()


def _no_key(token: str) -> str:
    """Say what is wrong with a text that is no key, without repeating it."""
    if not token.startswith(PREFIX):
        return f"this is no key of fusequeue: they begin with {PREFIX}"
    return "the API key is mistyped or cut off: its checksum does not fit"
