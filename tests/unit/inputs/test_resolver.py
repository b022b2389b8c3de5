"""Name resolution: a silent name server costs a tenant its own share."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shared.errors import FetchFailed, Overloaded
from shared.inputs import fetch_guard, resolver
from shared.inputs.fetch_guard import FetchGuard, FetchRules
from shared.runtime.shares import SharedPool

PUBLIC = "93.184.216.34"
RULES = FetchRules(timeout_s=20, max_bytes=1000)


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Names below silent.example are looked up until the event is set; others have a public address."""
    answered = threading.Event()

    def getaddrinfo(host: str, port: int, **more: Any) -> list[Any]:
        if host.endswith("silent.example"):
            answered.wait(60)
            raise OSError("timed out")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (PUBLIC, port))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(fetch_guard, "_RESOLVE_S", 0.2)
    yield answered
    answered.set()


async def _flood(tenant: str, count: int) -> list[BaseException]:
    guard = FetchGuard(RULES, tenant=tenant)
    lookups = (guard.resolve_url(f"https://n{number}.silent.example/") for number in range(count))
    results = await asyncio.gather(*lookups, return_exceptions=True)
    return [result for result in results if isinstance(result, BaseException)]


async def test_silent_name_servers_cost_a_tenant_its_own_share(
    silent: threading.Event, eventually: Callable[..., Any]
) -> None:
    """100 silent names of one tenant; meanwhile the names of others are resolved, then also its own again."""
    errors = await _flood("greedy", 100)
    assert len(errors) == 100
    assert sum(isinstance(error, Overloaded) for error in errors) == 100 - 32
    assert sum(isinstance(error, FetchFailed) for error in errors) == 32
    assert all(isinstance(error, Overloaded) for error in await _flood("greedy", 5))  # it still holds its share
    for tenant in "abcd":
        target = await FetchGuard(RULES, tenant=tenant).resolve_url("https://images.example/")
        assert target.addresses == (PUBLIC,)
    silent.set()

    async def resolves() -> bool:
        try:
            await FetchGuard(RULES, tenant="greedy").resolve_url("https://images.example/")
        except Overloaded:
            return False
        return True

    await eventually(resolves, "the share is free again")


async def test_a_name_without_address_is_an_error() -> None:
    """Also one that IDNA cannot encode; the place is given back."""
    lookups = SharedPool("name_lookups", 2)
    for host in ("does-not-exist.invalid", "a" * 70 + ".example"):
        with pytest.raises((OSError, UnicodeError)):
            await resolver.resolve(host, 443, "a", lookups)
    assert "127.0.0.1" in await resolver.resolve("localhost", 443, "a", lookups)


async def test_threads_that_the_system_refuses_are_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    lookups = SharedPool("name_lookups", 2)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(Overloaded, match="no more threads"):
            await resolver.resolve("localhost", 443, "a", lookups)
    assert lookups.free == 2
