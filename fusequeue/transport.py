"""HTTP requests with retries.

Not stamina: it fixes the number of attempts and the time limit when the first attempt starts, but here they depend on
whether the service has ever responded and since when it is unavailable, and `Retry-After` sets the delay.
"""

import asyncio
import json
import random
import time
from collections.abc import Mapping
from itertools import count
from typing import Any

import httpx

from fusequeue.errors import Busy, Invalid, NotFound, RefusedError, Unauthorized, Unreachable

UNAVAILABLE = frozenset({502, 503, 504})  # responses of a proxy while the service behind it restarts
RETRIED = UNAVAILABLE | {408, 429}
RESTART_S = 60.0  # a restart of the service takes less
FIRST_DELAY_S = 0.25
MAX_DELAY_S = 8.0
MAX_RETRY_AFTER_S = 60.0
ERRORS: dict[int, type[RefusedError]] = {
    **dict.fromkeys((400, 413, 415, 422), Invalid),
    **dict.fromkeys((401, 403), Unauthorized),
    404: NotFound,
    **dict.fromkeys((429, 503), Busy),
}


def delay_s(attempt: int, retry_after_s: float | None, jitter: float) -> float | None:
    """Return the delay after failed attempt number `attempt` (from 0), None to give up.

    Exponential with full jitter; `jitter` is random in 0 to 1. A `Retry-After` is extended by up to a tenth, so that
    not all clients return at once.
    """
    if retry_after_s is not None:
        return None if retry_after_s > MAX_RETRY_AFTER_S else retry_after_s * (1 + 0.1 * jitter)
    return min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** min(attempt, 10)) * jitter


class Transport:
    """The connection to a service. Requests must be safe to repeat: POSTs carry an Idempotency-Key.

    Gives up after `retries` retries, or, if the service has responded before and is unavailable, after `RESTART_S`
    seconds (at once if `retries` is 0).
    """

    def __init__(self, client: httpx.AsyncClient, retries: int) -> None:
        self.client = client
        self.retries = retries
        self.responded = False  # ever

    async def json(self, method: str, path: str, **options: Any) -> Any:
        """Send a request and return its decoded JSON, None for an empty response."""
        response = await self.send(method, path, **options)
        return response.json() if response.content else None

    async def send(self, method: str, path: str, *, removes: bool = False, **options: Any) -> httpx.Response:
        """Send a request; raises `RefusedError` for an error response and `Unreachable` for none.

        With `removes`, the request takes its object away: a 404 after an attempt whose outcome is unknown is a success.
        """
        down_since: float | None = None
        unknown = False
        for attempt in count():
            failure: httpx.TransportError | None = None
            try:
                response = await self.client.request(method, path, **options)
            except httpx.TransportError as error:
                failure = error
            if failure is not None or response.status_code in UNAVAILABLE:
                down_since = down_since or time.monotonic()
                unknown = True
            else:
                self.responded, down_since = True, None
            restarting = down_since is not None and self.responded and time.monotonic() - down_since < RESTART_S
            last = attempt >= self.retries and not (restarting and self.retries)
            if failure is not None:
                if last:
                    raise unreachable(self.client.base_url, failure) from failure
                await self.pause(attempt, None)
            elif response.is_success or response.is_redirect or (removes and unknown and response.status_code == 404):
                return response
            elif last or not is_retryable(response) or not await self.pause(attempt, retry_after_s(response.headers)):
                raise refusal(response)
        raise AssertionError("the last attempt returns or raises")

    async def pause(self, attempt: int, retry_after_s: float | None) -> bool:
        """Wait before the next attempt; False, without waiting, if the delay would be too long."""
        delay = delay_s(attempt, retry_after_s, random.random())
        if delay is None:
            return False
        await asyncio.sleep(delay)
        return True


def is_retryable(response: httpx.Response) -> bool:
    """Return whether the same request may succeed later."""
    should_retry = response.headers.get("x-should-retry")
    return should_retry == "true" or (response.status_code in RETRIED and should_retry != "false")


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of `Retry-After`; None if it is missing or a date."""
    try:
        return max(0.0, float(headers["retry-after"]))
    except (KeyError, ValueError):
        return None


def refusal(response: httpx.Response) -> RefusedError:
    """Return the exception for an error response whose body has been read."""
    try:
        body = response.json()
    except (json.JSONDecodeError, UnicodeDecodeError):
        body = None
    problem = body if isinstance(body, dict) else {}  # a proxy may send anything
    details = problem.get("error")
    param = details.get("param") if isinstance(details, dict) else None
    error = ERRORS.get(response.status_code, RefusedError)(
        str(problem.get("detail") or f"HTTP status {response.status_code}"),
        status=response.status_code,
        code=str(problem.get("code") or f"http_{response.status_code}"),
        param=param if isinstance(param, str) else None,
        request_id=response.headers.get("x-request-id"),
    )
    error.retry_after_s = retry_after_s(response.headers)
    return error


def unreachable(base_url: httpx.URL, error: httpx.TransportError) -> Unreachable:
    """Return the exception for a service that did not respond."""
    return Unreachable(f"{base_url}: {error or type(error).__name__}; is it running? `fusequeue up` starts one here")
