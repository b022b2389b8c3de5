"""API keys and tenants: what a key looks like, what it may do, and how much its tenant may.

A key is `fq_` and 48 letters and digits: 10 of its id, 32 of its secret (190 bits of chance), 6 of a checksum. The
checksum tells a mistyped key, or a text that only looks like one, without asking Redis; secret scanners find
`fq_[0-9A-Za-z]{48}`. Only the SHA-256 of the whole is kept: with that much chance in it, a slow hash would protect
nothing.
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

from shared.errors import InvalidRequest

PREFIX = "fq_"
DEFAULT_TENANT = "default"
MAX_NAME_CHARS = 100
_ID_CHARS, _SECRET_CHARS, _CHECK_CHARS = 10, 32, 6
_LETTERS = string.digits + string.ascii_uppercase + string.ascii_lowercase
_TOKEN = re.compile(rf"{PREFIX}[0-9A-Za-z]{{{_ID_CHARS + _SECRET_CHARS + _CHECK_CHARS}}}")
# Part of key names and of object keys, where `|`, `/`, `*` and capitals would mean something.
_TENANT = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")


class Scope(StrEnum):
    """What a key may do; none implies another."""

    JOBS_READ = "jobs:read"
    JOBS_WRITE = "jobs:write"
    ADMIN = "admin"


@dataclass(frozen=True)
class ApiKey:
    """A key as it is kept: all but the key itself. Times are Redis' own, in ms since the epoch."""

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
        """Return the beginning of the key, by which people tell it from others."""
        return PREFIX + self.id

    def fits(self, token: str) -> bool:
        """Say whether `token` is this key, in a time that does not depend on how much of it fits."""
        return hmac.compare_digest(self.digest, digest_of(token))


@dataclass(frozen=True)
class TenantLimits:
    """How much a tenant may; None: as the settings say."""

    requests_per_minute: int | None = None
    queued_jobs: int | None = None
    running_slots: int | None = None


@dataclass(frozen=True)
class Identity:
    """Who asks, as Redis knows it: the key (None: there is none) and its tenant's limits.

    `keys_made` says whether this namespace has ever had a key.
    """

    keys_made: bool
    key: ApiKey | None
    limits: TenantLimits


@dataclass(frozen=True)
class Rate:
    """What became of one request under its tenant's limit. `reset_ms`: until all of the limit is free again."""

    allowed: bool
    limit: int
    remaining: int
    reset_ms: int
    retry_ms: int


def new_token() -> str:
    """Return a key that nobody has."""
    body = "".join(secrets.choice(_LETTERS) for _ in range(_ID_CHARS + _SECRET_CHARS))
    return PREFIX + body + _checksum(body)


def id_of(token: str) -> str | None:
    """Return the id in `token`; None where this is no key, or one that was mistyped or cut off."""
    if not _TOKEN.fullmatch(token):
        return None
    body, check = token[len(PREFIX) : -_CHECK_CHARS], token[-_CHECK_CHARS:]
    return body[:_ID_CHARS] if _checksum(body) == check else None


def digest_of(token: str) -> str:
    """Return what is kept of a key."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def tenant_name(text: str) -> str:
    """Return `text`, or raise `InvalidRequest` where it is no name for a tenant."""
    if not _TENANT.fullmatch(text):
        raise InvalidRequest(
            f"tenant: {text[:70]!r} must be 1 to 63 of a-z, 0-9, - and _, and begin with a letter or digit",
            param="tenant",
        )
    return text


def scopes_of(text: str) -> frozenset[Scope]:
    """Return the scopes named in `text`, by commas; raises `InvalidRequest`."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    try:
        found = frozenset(Scope(word) for word in words)
    except ValueError:
        found = frozenset()
    if not found:
        raise InvalidRequest(f"scopes: {text[:70]!r} must be one or more of {', '.join(Scope)}", param="scopes")
    return found


def seconds_of(text: str) -> int:
    """Return a duration such as `90d`, `12h`, `30m` or `45s` in seconds; raises `InvalidRequest`."""
    found = re.fullmatch(r"([1-9][0-9]{0,8})([smhd])", text.strip())
    seconds = int(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86_400}[found[2]] if found else 0
    if not 1 <= seconds <= 100 * 366 * 86_400:
        raise InvalidRequest(f"expires: {text[:20]!r} must be a time such as 90d, 12h, 30m or 45s", param="expires")
    return seconds


def _checksum(body: str) -> str:
    number = zlib.crc32(body.encode("ascii"))
    digits = []
    for _ in range(_CHECK_CHARS):
        number, digit = divmod(number, len(_LETTERS))
        digits.append(_LETTERS[digit])
    return "".join(reversed(digits))
