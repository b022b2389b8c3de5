"""Requests to URLs from clients, protected against server-side request forgery.

A host name is resolved once, all its addresses are checked, and the connection uses a checked address, so DNS
rebinding has no effect. Redirects are not followed, and proxies of the environment are not used.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import re
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache

import httpx

from shared.config.destinations import MAX_PUT_URL_CHARS
from shared.config.settings import Settings
from shared.errors import FetchFailed, FetchInterrupted, FetchRefused
from shared.inputs import resolver
from shared.inputs.addresses import Network, is_within, refusal
from shared.runtime.shares import SharedPool, SharedTurns

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
Sink = Callable[[bytes], Awaitable[None]]

MAX_URL_CHARS = 2048
INTERNAL_NAMES = (".svc", ".cluster.local", ".internal")
"""Names that resolve in clusters and clouds only; a cluster's Services can have public addresses."""
THIS_MACHINE = ("127.0.0.1", "::1", "localhost")
LOOPBACK: tuple[Network, ...] = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128"))

_MAX_ADDRESSES = 16  # per host name
_CONNECT_ATTEMPTS = 2  # one per address
_CONNECT_S = 5.0
_RESOLVE_S = 5.0
_TURN_S = 15.0
_MAX_WAITING = 256  # of one tenant
FETCHES = SharedTurns(SharedPool("image_fetches", 64), max_waiting=_MAX_WAITING, timeout_s=_TURN_S)
# Bodies from their first byte until they are stored, by the declared length, else by the longest that is allowed.
FETCHED_BYTES = SharedTurns(SharedPool("fetched_bytes", 96 * 1024 * 1024), max_waiting=_MAX_WAITING, timeout_s=_TURN_S)
_system_tls = cache(ssl.create_default_context)
_HOST = re.compile(r"(?=.{1,253}$)[a-z0-9_]([a-z0-9_-]{0,62})(\.[a-z0-9_]([a-z0-9_-]{0,62}))*")
_LENGTH = re.compile(r"[0-9]{1,18}")
_NUMERIC_END = re.compile(r"(^|\.)(0x[0-9a-f]*|[0-9]+)$")

ACCEPTED = (
    "image/png, image/jpeg, image/webp, video/mp4, video/quicktime, video/x-m4v, audio/*, application/safetensors"
)


@dataclass(frozen=True)
class FetchRules:
    """Limits of a request; `timeout_s` covers everything from name resolution to the last byte.

    With `max_bytes` of 0 no body is read.
    """

    timeout_s: float
    max_bytes: int
    ports: tuple[int, ...] = (443,)
    allow_http: bool = False
    networks: tuple[Network, ...] = ()
    """Private networks that are allowed, but for those in `refused`."""
    refused: tuple[Network, ...] = ()
    max_url_chars: int = MAX_URL_CHARS
    loopback: bool | None = None
    """Whether this machine is allowed by its usual names, by http and on any port; None: as any other host."""

    @classmethod
    def for_inputs(cls, settings: Settings) -> FetchRules:
        """Return the rules for input images."""
        return cls(
            timeout_s=settings.fetch_timeout_s,
            max_bytes=settings.max_input_bytes,
            ports=settings.fetch_ports,
            allow_http=settings.fetch_allow_http,
            networks=settings.fetch_allow_networks,
            refused=settings.refuse_networks,
        )

    @classmethod
    def for_adapters(cls, settings: Settings) -> FetchRules:
        """Return the rules for adapters: those for images, with their own size and time."""
        inputs = cls.for_inputs(settings)
        return replace(
            inputs,
            timeout_s=settings.adapter_fetch_timeout_s,
            max_bytes=settings.max_adapter_bytes,
            max_url_chars=MAX_PUT_URL_CHARS,  # redirects lead to signed URLs
        )

    @classmethod
    def for_webhooks(cls, settings: Settings) -> FetchRules:
        """Return the rules for webhook deliveries; only the head of a response is read."""
        return cls(
            timeout_s=settings.webhook_timeout_s,
            max_bytes=0,
            ports=settings.webhook_ports,
            allow_http=settings.webhook_allow_http,
            networks=settings.webhook_allow_networks + (LOOPBACK if settings.webhook_allow_loopback else ()),
            loopback=settings.webhook_allow_loopback,
            refused=settings.refuse_networks,
        )

    @classmethod
    def for_outputs(cls, settings: Settings) -> FetchRules:
        """Return the rules for PUTs of outputs; only the first part of an error is read."""
        return cls(
            timeout_s=settings.output_timeout_s,
            max_bytes=64 * 1024,
            ports=settings.output_ports,
            allow_http=settings.output_allow_http,
            networks=settings.output_allow_networks,
            refused=settings.refuse_networks,
            max_url_chars=MAX_PUT_URL_CHARS,
        )


@dataclass(frozen=True)
class FetchTarget:
    """An allowed URL and its checked addresses."""

    url: httpx.URL
    host: str
    port: int
    addresses: tuple[str, ...]


@dataclass(frozen=True)
class FetchResponse:
    """A response; `body` is None if it is longer than the rules allow, or not read."""

    status: int
    headers: Mapping[str, str]
    body: bytes | None


def is_busy(status: int) -> bool:
    """Return whether a host with this status can respond otherwise later."""
    return status >= 500 or status in (408, 425, 429)


@dataclass(frozen=True)
class _Request:
    """What is sent, what holds the memory of the response, and whether the body of a success is read.

    With a sink, it gets the body of a response with status 200 in pieces, and no other body is read.
    """

    method: str
    headers: Mapping[str, str]
    content: bytes | None
    memory: AsyncExitStack
    reads_success: bool
    sink: Sink | None = None


@dataclass(frozen=True)
class FetchGuard:
    """HTTP client for URLs of one tenant, which uses its share of lookups and fetches.

    No request lasts beyond `until_s` (time.monotonic()). `resolve` and `tls` are replaced in tests.
    """

    rules: FetchRules
    resolve: Resolve | None = None
    tls: ssl.SSLContext = field(default_factory=_system_tls)
    tenant: str = ""
    until_s: float = math.inf

    async def resolve_url(self, url: str) -> FetchTarget:
        """Resolve and check `url`, or raise `FetchRefused`."""
        target = self.check_url(url)
        if target.addresses:
            return target
        addresses = await self._addresses(target.host, target.port)
        for address in addresses:
            self._check_address(target.host, address)
        return replace(target, addresses=addresses[:_CONNECT_ATTEMPTS])

    def check_url(self, url: str) -> FetchTarget:
        """Return the target of `url`, with addresses only if its host is one; makes no request.

        Raises `FetchRefused` if `url` is not allowed whatever its name resolves to.
        """
        parsed = self._parse(url)
        port = (443 if parsed.scheme == "https" else 80) if parsed.port is None else parsed.port
        host = parsed.raw_host.decode("ascii").lower().removesuffix(".")
        allows_port = port in self.rules.ports or (port == 80 and self.rules.allow_http)
        if not allows_port and not self._opens_loopback(host):
            raise FetchRefused(f"port not allowed: {port}; use one of {', '.join(map(str, sorted(self.rules.ports)))}")
        literal = _literal_address(host)
        if literal:
            self._check_address(host, literal)
        elif host.endswith(INTERNAL_NAMES) and not self.rules.networks:
            raise FetchRefused(f"host not allowed: {host} is a name of a private network")
        return FetchTarget(parsed, host, port, (literal,) if literal else ())

    async def get(self, url: str) -> bytes:
        """Return the body of `url`; see `fetched`."""
        async with self.fetched(url) as body:
            return body

    @asynccontextmanager
    async def fetched(self, url: str) -> AsyncIterator[bytes]:
        """Hold the body of `url` and its memory; raises `FetchRefused`, `FetchFailed` or `Overloaded`."""
        async with AsyncExitStack() as memory:
            async with FETCHES.turn(self.tenant, 1):
                headers = {"accept": ACCEPTED}
                response = await self._send(url, _Request("GET", headers, None, memory, reads_success=True))
            if response.status in (301, 302, 303, 307, 308):
                raise FetchFailed("the URL redirects; use its final address")
            if response.status != 200:
                error = FetchInterrupted if is_busy(response.status) else FetchFailed
                raise error(f"the URL responded with status {response.status}")
            if response.body is None:
                raise FetchFailed(f"the URL has more than {self.rules.max_bytes} bytes")
            yield response.body

    async def send(
        self, method: str, url: str, *, headers: Mapping[str, str] | None = None, content: bytes | None = None
    ) -> FetchResponse:
        """Make one request and return the response, whatever its status; of a success only the head."""
        async with AsyncExitStack() as memory:
            return await self._send(url, _Request(method, headers or {}, content, memory, reads_success=False))

    async def download(self, url: str, sink: Sink, headers: Mapping[str, str]) -> FetchResponse:
        """Give the body at `url` to `sink` in pieces, if the status is 200, and return the head of the response.

        Raises `FetchRefused`, or `FetchFailed` for a body that is too long.
        """
        async with AsyncExitStack() as memory:
            return await self._send(url, _Request("GET", headers, None, memory, reads_success=True, sink=sink))

    async def _send(self, url: str, request: _Request) -> FetchResponse:
        try:
            async with asyncio.timeout(self._left_s()):
                target = await self.resolve_url(url)
                return await self._call(target, request)
        except TimeoutError as error:
            if self.until_s <= time.monotonic():
                raise FetchInterrupted("the URLs of the request took too long together") from error
            raise FetchInterrupted(f"no complete response within {self.rules.timeout_s:g} s") from error

    def _left_s(self) -> float:
        return min(self.rules.timeout_s, max(0.0, self.until_s - time.monotonic()))

    def _check_address(self, host: str, address: str) -> None:
        reason = refusal(address, self.rules.networks, self.rules.refused)
        if reason is None and host.endswith(INTERNAL_NAMES) and not is_within(address, self.rules.networks):
            reason = "a name of a private network"
        if reason is not None:
            raise FetchRefused(f"host not allowed: {host} is {reason}")

    def _opens_loopback(self, host: str) -> bool:
        """Return whether `host` is this machine and open; raises `FetchRefused` that names the setting."""
        if self.rules.loopback is None or host not in THIS_MACHINE:
            return False
        if not self.rules.loopback and not any(is_within(one, self.rules.networks) for one in THIS_MACHINE[:2]):
            remedy = "FUSEQUEUE_WEBHOOK_ALLOW_LOOPBACK=1 allows it"
            raise FetchRefused(f"host not allowed: {host} is this machine; {remedy}")
        return self.rules.loopback

    def _parse(self, url: str) -> httpx.URL:
        if len(url) > self.rules.max_url_chars:
            raise FetchRefused(f"the URL has more than {self.rules.max_url_chars} characters")
        if any(character <= " " or character in "\\\x7f" for character in url):
            raise FetchRefused("the URL has a space, a backslash or a control character")
        try:
            parsed = httpx.URL(url)
            host = parsed.host  # decodes it
        except (httpx.InvalidURL, UnicodeError) as error:
            raise FetchRefused("the URL is invalid") from error
        allows_http = self._opens_loopback(host.lower()) or self.rules.allow_http
        if parsed.scheme != "https" and not (parsed.scheme == "http" and allows_http):
            raise FetchRefused("the URL must start with https://")
        if parsed.userinfo or "@" in re.split("[/?#]", url.partition("//")[2])[0]:
            raise FetchRefused("the URL must not have a user or password")
        if not host:
            raise FetchRefused("the URL has no host")
        return parsed

    async def _addresses(self, host: str, port: int) -> tuple[str, ...]:
        try:
            async with asyncio.timeout(_RESOLVE_S):
                addresses = tuple(await self._resolve(host, port))
        except (OSError, UnicodeError, TimeoutError) as error:
            raise FetchInterrupted(f"cannot resolve {host}") from error
        if not addresses:
            raise FetchInterrupted(f"cannot resolve {host}")
        if len(addresses) > _MAX_ADDRESSES:
            raise FetchRefused(f"{host} has more than {_MAX_ADDRESSES} addresses")
        return addresses

    async def _resolve(self, host: str, port: int) -> Sequence[str]:
        if self.resolve is not None:
            return await self.resolve(host, port)
        return await resolver.resolve(host, port, self.tenant)

    async def _call(self, target: FetchTarget, request: _Request) -> FetchResponse:
        connect_error: httpx.HTTPError | None = None
        for address in target.addresses:
            try:
                return await self._call_at(address, target, request)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                connect_error = error
            except (httpx.HTTPError, ValueError) as error:  # ValueError: h11 reads a length of 5,000 digits
                raise FetchInterrupted(f"the request to {target.host} failed: {type(error).__name__}") from error
        raise FetchInterrupted(f"cannot reach {target.host}") from connect_error

    async def _call_at(self, address: str, target: FetchTarget, request: _Request) -> FetchResponse:
        own = {"host": target.url.netloc.decode("ascii"), "accept-encoding": "identity"}
        # One client per request: a pooled connection is found by address and could serve another host name.
        async with (
            httpx.AsyncClient(
                transport=httpx.AsyncHTTPTransport(verify=self.tls, trust_env=False, retries=0),
                timeout=httpx.Timeout(self.rules.timeout_s, connect=min(_CONNECT_S, self.rules.timeout_s)),
                follow_redirects=False,
                trust_env=False,
            ) as client,
            client.stream(
                request.method,
                target.url.copy_with(host=address),
                headers={**request.headers, **own},
                content=request.content,
                extensions={"sni_hostname": target.host},
            ) as response,
        ):
            if request.sink is not None:
                if response.status_code == 200:
                    await self._pour(response, request.sink)
                return FetchResponse(response.status_code, response.headers, None)
            is_read = self.rules.max_bytes > 0 and (request.reads_success or not response.is_success)
            body = await self._read(response, request.memory) if is_read else None
            return FetchResponse(response.status_code, response.headers, body)

    async def _pour(self, response: httpx.Response, sink: Sink) -> None:
        received, most = 0, self.rules.max_bytes
        is_longer = self._declared(response) > most
        async for chunk in response.aiter_raw():
            received += len(chunk)
            if is_longer or received > most:
                raise FetchFailed(f"the URL has more than {most} bytes")
            await sink(chunk)

    def _declared(self, response: httpx.Response) -> int:
        """Return the length that a response declares, else the longest that is allowed."""
        declared = response.headers.get("content-length", "")
        return int(declared) if _LENGTH.fullmatch(declared) else self.rules.max_bytes

    async def _read(self, response: httpx.Response, memory: AsyncExitStack) -> bytes | None:
        length, most = self._declared(response), self.rules.max_bytes
        if length > most:
            return None
        await memory.enter_async_context(FETCHED_BYTES.turn(self.tenant, max(1, length)))
        body = bytearray()
        async for chunk in response.aiter_raw():  # raw: unrequested compression is not unpacked
            body += chunk
            if len(body) > most:
                return None
        return bytes(body)


def _literal_address(host: str) -> str | None:
    """Return the address in `host`, None for a name; unusual notations of addresses are refused."""
    try:
        return str(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    if _NUMERIC_END.search(host) or not _HOST.fullmatch(host):
        raise FetchRefused("the URL's host is neither a name nor an address in standard notation")
    return None
