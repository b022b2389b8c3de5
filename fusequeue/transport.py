"""One request, tried again where that is safe and may help."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping
from itertools import count
from typing import Any

import httpx

from fusequeue.errors import Unreachable, refused

AWAY = frozenset({502, 503, 504})  # what a proxy answers while the service behind it is replaced
RETRIED = AWAY | {408, 429}
COMES_BACK_S = 60.0  # a service that is replaced is away for less
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 8.0
LONGEST_RETRY_AFTER_S = 60.0


def pause_s(attempt: int, retry_after_s: float | None, spread: float) -> float | None:
    """Return how long to wait after the failed attempt number `attempt` (from 0), None to give up.

    Exponential with full jitter, `spread` being drawn from 0 to 1; a server that names a time is believed, with a
    tenth on top so that its clients do not come back all at once.
    """
    if retry_after_s is not None:
        return None if retry_after_s > LONGEST_RETRY_AFTER_S else retry_after_s * (1 + 0.1 * spread)
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(attempt, 10)) * spread


class Transport:
    """The connection to a service. Requests must be safe to repeat: POSTs carry an Idempotency-Key.

    A service that has never answered is given up after `retries` more attempts; one that has is being replaced, and is
    given `COMES_BACK_S` seconds (none where `retries` is 0).
    """

    def __init__(self, client: httpx.AsyncClient, retries: int) -> None:
        self.client = client
        self.retries = retries
        self.known = False  # it has answered

    async def json(self, method: str, path: str, **options: Any) -> Any:
        """Send a request and return its decoded JSON, None for an answer without content."""
        answer = await self.send(method, path, **options)
        return answer.json() if answer.content else None

    async def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send a request; raises `RefusedError` for an error answer and `Unreachable` for none."""
        away_since: float | None = None
        for attempt in count():
            failure: httpx.TransportError | None = None
            try:
                answer = await self.client.request(method, path, **options)
            except httpx.TransportError as error:
                failure = error
            if failure is not None or answer.status_code in AWAY:
                away_since = away_since or time.monotonic()
            else:
                self.known, away_since = True, None
            last = attempt >= self.retries and not self.comes_back(away_since)
            if failure is not None:
                if last:
                    raise unreachable(self.client.base_url, failure) from failure
                await self.pause(attempt, None)
            elif answer.is_success or answer.is_redirect:
                return answer
            elif last or not worth_retrying(answer) or not await self.pause(attempt, retry_after_s(answer.headers)):
                raise refusal(answer)
        raise AssertionError("the last attempt returns or raises")

    def comes_back(self, away_since: float | None) -> bool:
        """Say whether a service that is away since then (`time.monotonic`) may yet answer; None is not away."""
        if away_since is None or not self.known or not self.retries:
            return False
        return time.monotonic() - away_since < COMES_BACK_S

    async def pause(self, attempt: int, wanted_s: float | None) -> bool:
        """Wait before another attempt; False says that it would be too long."""
        pause = pause_s(attempt, wanted_s, random.random())
        if pause is None:
            return False
        await asyncio.sleep(pause)
        return True


def worth_retrying(answer: httpx.Response) -> bool:
    """Say whether the same request may go better later."""
    told = answer.headers.get("x-should-retry")
    return told == "true" or (answer.status_code in RETRIED and told != "false")


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of `Retry-After`; None where it is missing or a date."""
    try:
        return max(0.0, float(headers["retry-after"]))
    except (KeyError, ValueError):
        return None


def refusal(answer: httpx.Response) -> Exception:
    """Return the exception for an error answer whose body has been read."""
    try:
        body: object = answer.json()
    except (json.JSONDecodeError, UnicodeDecodeError):
        body = None
    return refused(
        answer.status_code,
        body,
        request_id=answer.headers.get("x-request-id"),
        retry_after_s=retry_after_s(answer.headers),
    )


def unreachable(base_url: httpx.URL, error: httpx.TransportError) -> Unreachable:
    """Return the exception for a service that gave no answer."""
    return Unreachable(f"{base_url}: {error or type(error).__name__}; is it running? `fusequeue up` starts one here")
