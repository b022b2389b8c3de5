"""Idempotency-Key: the same key and body give the same job, the same key and another body is an error."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Header

from shared.errors import InvalidRequest

_KEY = re.compile(r"[\x21-\x7e]{1,255}")


@dataclass(frozen=True)
class Once:
    """What makes a submit unrepeatable: a client's key and the sha256 of the raw body; both None without a key."""

    key: str | None = None
    fingerprint: str | None = None


async def idempotency_key(
    key: Annotated[
        str | None,
        Header(alias="Idempotency-Key", description="1 to 255 visible ASCII characters; kept for a day."),
    ] = None,
) -> str | None:
    """Return the request's Idempotency-Key, or raise `InvalidRequest`."""
    if key is not None and not _KEY.fullmatch(key):
        raise InvalidRequest("Idempotency-Key must be 1 to 255 visible ASCII characters", param="Idempotency-Key")
    return key


Key = Annotated[str | None, Depends(idempotency_key)]


def once(key: str | None, raw: bytes, line: int | None = None) -> Once:
    """Return what makes the submit of `raw` unrepeatable; a bulk line goes by the key and its number."""
    if key is None:
        return Once()
    return Once(key if line is None else f"{key}:line:{line}", hashlib.sha256(raw).hexdigest())
