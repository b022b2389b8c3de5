"""Webhooks after the Standard Webhooks specification (1.0.0): events, bodies, signatures, retries."""

import re
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import StrEnum
from secrets import token_bytes
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from shared.job import State

JobEventName = Literal["job.queued", "job.running", "job.succeeded", "job.failed", "job.canceled", "job.expired"]
EVENTS: dict[JobEventName, State] = {name: State(name.partition(".")[2]) for name in get_args(JobEventName)}

TERMINAL_EVENTS: tuple[JobEventName, ...] = tuple(name for name, state in EVENTS.items() if state.terminal)
ROTATION_MS = 86_400_000
"""How long a replaced secret still signs."""

SCHEDULE_S = (5, 300, 1_800, 7_200, 18_000, 36_000, 36_000, 50_400)
"""Delay after each failed attempt, 44 hours in total; after the last one the delivery has failed."""

DISABLED_AFTER_S = 5 * 86_400
"""An endpoint is disabled when all its attempts have failed for this long."""

MAX_RETRY_AFTER_S = 86_400
_SECONDS = re.compile(r"[0-9]{1,9}")  # of a Retry-After header
_SLOW_DOWN = frozenset((429, 502, 504))


class SigningSecret(BaseModel):
    """`until_ms` is the end of a replaced secret."""

    model_config = ConfigDict(frozen=True)

    secret: str = Field(repr=False)
    until_ms: int | None = None


class WebhookEndpoint(BaseModel):
    """URL of a tenant and its subscribed events, those of jobs by their state.

    `failing_since` in ms; None while deliveries succeed. After `expires_at_ms` it is deleted.
    """

    model_config = ConfigDict(frozen=True)

    id: str
    url: str
    states: tuple[str, ...]
    secrets: tuple[SigningSecret, ...]
    enabled: bool = True
    description: str = ""
    created_at_ms: int
    failing_since: float | None = None
    disabled_reason: str | None = None
    expires_at_ms: int | None = None

    def has_expired(self, now_ms: float) -> bool:
        return self.expires_at_ms is not None and self.expires_at_ms <= now_ms


class DeliveryState(StrEnum):
    DELIVERED = "delivered"
    PENDING = "pending"
    FAILED = "failed"


@dataclass(frozen=True)
class AttemptOutcome:
    """State of a delivery after an attempt; `retry_s` while pending. `gone`: disable the endpoint."""

    state: DeliveryState
    retry_s: float | None = None
    gone: bool = False


def attempt_outcome(attempts: int, status: int | None, retry_after_s: float | None, jitter: float) -> AttemptOutcome:
    """Return the outcome of an attempt.

    `attempts` includes this one. `status` is None without a response. `jitter`, from 0 to 1, changes the delay by up to
    a fifth. A redirect is a failure: its target was not vetted and would receive a signed body.
    """
    if status is not None and 200 <= status < 300:
        return AttemptOutcome(DeliveryState.DELIVERED)
    if status == 410:
        return AttemptOutcome(DeliveryState.FAILED, gone=True)
    if attempts > len(SCHEDULE_S):
        return AttemptOutcome(DeliveryState.FAILED)
    retry_s = SCHEDULE_S[attempts - 1] * (0.8 + 0.4 * jitter) * (2 if status in _SLOW_DOWN else 1)
    if retry_after_s is not None:
        retry_s = max(retry_s, min(retry_after_s, MAX_RETRY_AFTER_S))
    return AttemptOutcome(DeliveryState.PENDING, retry_s)


def retry_after_s(value: str, now: datetime) -> float | None:
    """Return the seconds of a `Retry-After` header, which has them or an HTTP date; None if it has neither."""
    if _SECONDS.fullmatch(value):
        return float(value)
    try:
        at = parsedate_to_datetime(value)
    except ValueError:
        return None
    return max(0.0, (at.replace(tzinfo=at.tzinfo or UTC) - now).total_seconds())


def new_secret() -> str:
    return "whsec_" + b64encode(token_bytes(32)).decode()


def rotate_secrets(secrets: Sequence[SigningSecret], now_ms: int) -> tuple[SigningSecret, ...]:
    """Return a new secret followed by the current one, which expires after a day."""
    current = secrets[0].model_copy(update={"until_ms": now_ms + ROTATION_MS})
    return (SigningSecret(secret=new_secret()), current)
