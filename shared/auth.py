"""API keys, scopes, tenant limits, and signed URLs.

A key is `fq_` and 48 letters and digits: 10 of its id, 32 of its secret (190 bits of entropy), 6 of a checksum. The
checksum detects mistyped keys without a Redis call; secret scanners match `fq_[0-9A-Za-z]{48}`. Only the SHA-256 of a
key is stored: with that much entropy a slow hash would not add protection.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import string
import zlib
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, TypeAlias

from shared.errors import InvalidRequest, NotFound, UrlRefused

if TYPE_CHECKING:
    from shared.storage import Storage

PREFIX = "fq_"
DEFAULT_TENANT = "default"
MAX_NAME_CHARS = 100
MAX_URL_EXPIRES = 10**11  # in epoch seconds
_ID_CHARS, _SECRET_CHARS, _CHECK_CHARS = 10, 32, 6
_LETTERS = string.digits + string.ascii_uppercase + string.ascii_lowercase
_TOKEN = re.compile(rf"{PREFIX}[0-9A-Za-z]{{{_ID_CHARS + _SECRET_CHARS + _CHECK_CHARS}}}")
# Part of Redis and object keys, in which `|`, `/`, `*` and capitals have a meaning.
_TENANT = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")


class Scope(StrEnum):
    """Permission of a key; none implies another, except that `admin` also reads metrics.

    Beside `admin`, `keys:create` creates keys over HTTP. Those have neither, so that only a command grants these two.
    """

    JOBS_READ = "jobs:read"
    JOBS_WRITE = "jobs:write"
    METRICS = "metrics"
    ADMIN = "admin"
    KEYS_CREATE = "keys:create"


@dataclass(frozen=True)
class ApiKey:
    """A stored key, without its secret. Times are those of Redis, in ms since the epoch."""

    id: str
    tenant: str
    scopes: frozenset[Scope]
    name: str
    created_at_ms: int
    expires_at_ms: int | None = None
    last_used_at_ms: int | None = None
    revoked_at_ms: int | None = None
    expired: bool = False
    digest: str = field(default="", repr=False)

    @property
    def prefix(self) -> str:
        """First part of the key, shown in lists."""
        return PREFIX + self.id

    def matches(self, token: str) -> bool:
        """Compare `token` with this key in constant time."""
        return hmac.compare_digest(self.digest, digest_of(token))


@dataclass(frozen=True)
class TenantLimits:
    """Limits of a tenant; None means that of the settings."""

    requests_per_minute: int | None = None
    queued_jobs: int | None = None
    running_slots: int | None = None
    device_seconds_per_day: int | None = None
    device_seconds_per_month: int | None = None
    kept_jobs: int | None = None
    record_bytes: int | None = None
    stored_objects: int | None = None
    stored_bytes: int | None = None


@dataclass(frozen=True)
class Footprint:
    """What a tenant keeps: records of jobs, its estimated share of Redis, and its objects in storage."""

    kept_jobs: int = 0
    record_bytes: int = 0
    stored_objects: int = 0
    stored_bytes: int = 0


@dataclass(frozen=True)
class TenantUse:
    """A tenant's use of the devices: images that run now, and its device seconds, halved every five minutes."""

    running_slots: int = 0
    device_seconds: float = 0.0


@dataclass(frozen=True)
class Spent:
    """Device seconds that a tenant has used in the present day and month (UTC)."""

    device_seconds_per_day: float = 0.0
    device_seconds_per_month: float = 0.0


@dataclass(frozen=True)
class Identity:
    """The key of a request, if any, and its tenant's limits. `keys_made`: a key was ever created in this namespace."""

    keys_made: bool
    key: ApiKey | None
    limits: TenantLimits


@dataclass(frozen=True)
class Rate:
    """Result of the rate limit for one request. `reset_ms`: time until the whole limit is available."""

    allowed: bool
    limit: int
    remaining: int
    reset_ms: int
    retry_ms: int


def new_token() -> str:
    body = "".join(secrets.choice(_LETTERS) for _ in range(_ID_CHARS + _SECRET_CHARS))
    return PREFIX + body + _checksum(body)


def id_of(token: str) -> str | None:
    """Return the id in `token`, or None if it is not a complete, correctly typed key."""
    if not _TOKEN.fullmatch(token):
        return None
    body, check = token[len(PREFIX) : -_CHECK_CHARS], token[-_CHECK_CHARS:]
    return body[:_ID_CHARS] if _checksum(body) == check else None


def digest_of(token: str) -> str:
    """Return the stored digest of a key."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def tenant_name(text: str) -> str:
    """Return `text`, or raise `InvalidRequest` if it is not a valid tenant name."""
    if not _TENANT.fullmatch(text):
        raise InvalidRequest(
            f"invalid tenant: {text[:70]!r}; use 1 to 63 of a-z, 0-9, - and _, with a letter or digit first",
            param="tenant",
        )
    return text


async def keys_marked(storage: Storage, namespace: str) -> bool:
    """Return whether the storage says that the namespace has had an API key."""
    try:
        await storage.head(_marker(namespace))
    except NotFound:
        return False
    return True


async def mark_keys(storage: Storage, namespace: str) -> None:
    """Record in the storage that the namespace has had an API key, for a Redis that loses its data."""
    await storage.put(_marker(namespace), b"API keys are required\n", "application/octet-stream")


def _marker(namespace: str) -> str:
    return f"control/{namespace}/keys-required"


def parse_scopes(text: str) -> frozenset[Scope]:
    """Return the comma-separated scopes in `text`, or raise `InvalidRequest`."""
    try:
        scopes = frozenset(Scope(name.strip()) for name in text.split(",") if name.strip())
    except ValueError:
        scopes = frozenset()
    if not scopes:
        raise InvalidRequest(f"invalid scopes: {text[:70]!r}; use one or more of {', '.join(Scope)}", param="scopes")
    return scopes


def _checksum(body: str) -> str:
    number = zlib.crc32(body.encode("ascii"))
    digits = []
    for _ in range(_CHECK_CHARS):
        number, digit = divmod(number, len(_LETTERS))
        digits.append(_LETTERS[digit])
    return "".join(reversed(digits))


JobPart: TypeAlias = int | Literal["events"]
SignedPart: TypeAlias = JobPart | Literal["upload"]


class Signer:
    """Signs URLs that need no key then, with the secret that the processes of a namespace share.

    A URL is signed for a part of a job: the index of an artifact, or `events`; or to upload an input.
    """

    def __init__(self, secret: bytes, lifetime_s: int) -> None:
        self._secret = secret
        self._lifetime_s = lifetime_s

    def query(self, object_id: str, part: SignedPart, now_ms: int) -> str:
        """Return the query to append to a URL, valid for one to two lifetimes.

        All URLs signed within one lifetime expire together, so that a response stays the same between polls.
        """
        return self.query_until(object_id, part, (now_ms // 1000 // self._lifetime_s + 2) * self._lifetime_s)

    def query_until(self, object_id: str, part: SignedPart, expires: int) -> str:
        """Return the query to append to a URL, valid until `expires`, in epoch seconds."""
        return f"?expires={expires}&signature={self._signature(object_id, part, expires)}"

    def check(self, object_id: str, part: SignedPart, *, expires: int, signature: str, now_ms: int) -> None:
        """Raise `UrlRefused` unless the signature is valid for this part of the job and has not expired."""
        expected = self._signature(object_id, part, expires) if 0 <= expires < MAX_URL_EXPIRES else ""
        if not hmac.compare_digest(expected.encode(), signature.encode("utf-8", "replace")):
            raise UrlRefused("the URL's signature is not valid; read the URL from the job again", param="signature")
        if expires * 1000 <= now_ms:
            raise UrlRefused("the URL has expired; read it from the job again", param="expires")

    def _signature(self, object_id: str, part: SignedPart, expires: int) -> str:
        name = part if isinstance(part, str) else f"artifact\n{part}"
        signed = f"{name}\n{object_id}\n{expires}".encode()
        return hmac.new(self._secret, signed, hashlib.sha256).hexdigest()
