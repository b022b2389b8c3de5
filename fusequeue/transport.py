"""HTTP requests with retries.

Not stamina: it fixes the number of attempts and the time limit when the first attempt starts, but here they depend on
whether the service has ever responded and since when it is unavailable, and `Retry-After` sets the delay.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import nullcontext
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from itertools import count
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from fusequeue.arguments import json_text, whole
from fusequeue.errors import (
    Busy,
    FieldError,
    Invalid,
    InvalidArgument,
    NotFound,
    RefusedError,
    Unauthorized,
    UnexpectedResponse,
    Unreachable,
)
from fusequeue.proxies import Proxies, ProxyTransport
from fusequeue.response_types import Page

T = TypeVar("T", bound=BaseModel)
Read = TypeVar("Read")

UNAVAILABLE = frozenset({502, 503, 504})  # responses of a proxy while the service behind it restarts
RETRIED = UNAVAILABLE | {408, 429}
RESTART_S = 60.0  # a restart of the service takes less
FIRST_DELAY_S = 0.25
MAX_DELAY_S = 8.0
MAX_RETRY_AFTER_S = 60.0
PAGE_SIZE = 100
MAX_REQUESTS = 100  # at a time, beside streams and waits: their number is the caller's own concurrency
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
        self._turns = asyncio.Semaphore(MAX_REQUESTS)

    async def read(self, kind: type[T], method: str, path: str, **options: Any) -> T:
        """Send a request and return the object in its response."""
        response = await self.send(method, path, **options)
        try:
            return parsed(TypeAdapter(kind), response.content)
        except UnexpectedResponse as error:
            raise UnexpectedResponse(
                f"{self.client.base_url}: not a response of fusequeue to {method} {path}: {error}; check the URL"
            ) from error

    async def pages(
        self, kind: type[T], path: str, limit: int | None = None, filters: Mapping[str, Any] | None = None
    ) -> AsyncGenerator[T]:
        """Yield the items of a list, up to `limit`."""
        query = {name: value for name, value in (filters or {}).items() if value is not None}
        limit = None if limit is None else whole("limit", limit)
        yielded = 0
        while limit is None or yielded < limit:
            size = PAGE_SIZE if limit is None else min(PAGE_SIZE, limit - yielded)
            page = await self.read(Page[kind], "GET", path, params={**query, "limit": size})  # type: ignore[valid-type]
            for item in page.data:
                yield item
            yielded += len(page.data)
            cursor = page.next_cursor or page.last_id
            if not page.has_more or cursor is None:
                return
            query["after"] = cursor

    async def listed(self, kind: type[T], path: str, **options: Any) -> list[T]:
        """Return the items of a list that has no pages."""
        return (await self.read(Page[kind], "GET", path, **options)).data  # type: ignore[valid-type]

    def _request(self, method: str, path: str, options: Mapping[str, Any]) -> httpx.Request:
        options = {**options}
        if (body := options.pop("json", None)) is not None:
            options["content"] = json_text(body)
            options["headers"] = {"Content-Type": "application/json", **options.get("headers", {})}
        try:
            request = self.client.build_request(method, path, **options)
        except (ValueError, TypeError, httpx.InvalidURL) as error:  # lone surrogates, for example
            raise InvalidArgument(f"the request cannot be sent: {error}") from error
        if _origin(request.url) != _origin(self.client.base_url):  # the URL of an image can be on any host
            request.headers.pop("Authorization", None)
        return request

    async def send(
        self, method: str, path: str, *, removes: bool = False, once: bool = False, waits: bool = False, **options: Any
    ) -> httpx.Response:
        """Send a request; raises `RefusedError` for an error response and `Unreachable` for none.

        With `once` it is not repeated, as a repetition has another effect. With `removes`, the request takes its object
        away: a 404 after an attempt with unknown outcome is a success. With `waits` it keeps no other from being sent.
        """
        request = self._request(method, path, options)
        down_since: float | None = None
        unknown = False
        for attempt in count():
            failure: httpx.RequestError | None = None
            try:
                async with nullcontext() if waits else self._turns:
                    response = await self.client.send(request)
            except httpx.RequestError as error:
                failure = error
            if failure is not None or response.status_code in UNAVAILABLE:
                down_since = down_since or time.monotonic()
                unknown = True
            else:
                self.responded, down_since = True, None
            restarting = down_since is not None and self.responded and time.monotonic() - down_since < RESTART_S
            last = once or (attempt >= self.retries and not (restarting and self.retries))
            if failure is not None:
                if last:
                    raise unreachable(self.client.base_url, failure, request.url) from failure
                await self.pause(attempt, None)
            elif response.is_success or (removes and unknown and response.status_code == 404):
                return response
            elif response.is_redirect:
                location = response.headers["location"]
                raise UnexpectedResponse(f"{request.url} redirects to {location:.200}; use that URL")
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


def open_client(
    base_url: str, api_key: str | None, timeout_s: float, transport: httpx.AsyncBaseTransport | None
) -> httpx.AsyncClient:
    """Return the connection to a service; raises `InvalidArgument` for a URL, key or proxy that cannot be used."""
    try:
        url = httpx.URL(base_url)
        if url.scheme not in ("http", "https") or not url.host or (url.port or 1) > 65_535:
            raise ValueError("use one such as http://localhost:8000")
        if url.path.rstrip("/").endswith("/v1"):
            raise ValueError("leave out /v1, which is in the path of each request")
    except (ValueError, TypeError, httpx.InvalidURL) as error:
        raise InvalidArgument(f"invalid URL of the service: {base_url!r}; {error}") from error
    if api_key and not (isinstance(api_key, str) and api_key.isascii() and api_key.isprintable()):
        raise InvalidArgument("invalid API key: it has characters other than printable ASCII")
    if transport is None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=MAX_REQUESTS)
        transport = ProxyTransport(Proxies.of_environment(), limits)
        transport.open(url)
    return httpx.AsyncClient(
        base_url=url,
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        timeout=httpx.Timeout(timeout_s, pool=None),
        transport=transport,
    )


def parsed(kind: TypeAdapter[Read], text: bytes) -> Read:
    """Return the object in a JSON text."""
    try:
        return kind.validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise UnexpectedResponse(f"{error.error_count()} faults, the first: {field}: {first['msg']}") from error


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


def is_retryable(response: httpx.Response) -> bool:
    """Return whether the same request may succeed later."""
    should_retry = response.headers.get("x-should-retry")
    return should_retry == "true" or (response.status_code in RETRIED and should_retry != "false")


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of `Retry-After`, which has them or an HTTP date, as of a proxy; None if it has neither."""
    value = headers.get("retry-after", "")
    if value.isascii() and value.isdigit():
        return float(value)
    try:
        at = parsedate_to_datetime(value)
    except ValueError:
        return None
    return max(0.0, (at.replace(tzinfo=at.tzinfo or UTC) - datetime.now(UTC)).total_seconds())


def refusal(response: httpx.Response) -> RefusedError:
    """Return the exception for an error response whose body has been read."""
    try:
        body = response.json()
    except (json.JSONDecodeError, UnicodeDecodeError):
        body = None
    problem = body if isinstance(body, dict) else {}  # a proxy may send anything
    rows = problem.get("errors")
    faults = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    details = problem.get("error")
    error = ERRORS.get(response.status_code, RefusedError)(
        str(problem.get("detail") or f"HTTP status {response.status_code}"),
        status=response.status_code,
        code=str(problem.get("code") or f"http_{response.status_code}"),
        param=_text(details.get("param")) if isinstance(details, dict) else None,
        request_id=response.headers.get("x-request-id"),
        errors=tuple(FieldError(_text(row.get("param")), str(row.get("message", ""))) for row in faults),
    )
    error.retry_after_s = retry_after_s(response.headers)
    return error


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def unreachable(base_url: httpx.URL, error: httpx.RequestError, url: httpx.URL | None = None) -> Unreachable:
    """Return the exception for a service that did not respond, or for another host, which has an image at `url`."""
    reason = str(error).rstrip(".") or type(error).__name__  # timeouts have no text
    if url is not None and _origin(url) != _origin(base_url):
        return Unreachable(f"{url.scheme}://{url.netloc.decode('ascii')}: {reason}")
    return Unreachable(f"{base_url}: {reason}; is it running? `fusequeue up` starts one here")
