"""The client with proxies in the environment."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator

import httpx
import pytest
from harness.canned import JOB

from fusequeue import AsyncClient, InvalidArgument, Unreachable
from fusequeue.proxies import Proxies

NAMES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
SERVICE = "http://gpu.example:8000"

# What NO_PROXY is, a URL, and whether its requests use no proxy.
EXEMPT = [
    ("fd00::/8", "http://[fd12::1]:8000", True),
    ("fd00::/8", "http://[fe80::1]:8000", False),
    ("[fd00::]/8", "http://[fd12::1]:8000", True),
    ("::1/128", "http://[::1]:8000", True),
    ("[::1]", "http://[::1]:8000", True),
    ("::1", "http://[0:0::1]", True),
    ("[::1]:8000", "http://[::1]:8000", True),
    ("[::1]:8000", "http://[::1]:8001", False),
    ("10.0.0.0/8", "http://10.1.2.3", True),
    ("10.1.2.3/8", "http://10.200.0.1", True),
    ("10.0.0.0/8", "http://11.1.2.3", False),
    ("10.0.0.0/8", "http://10.example", False),
    ("10.1.2.3", "http://10.1.2.3:8000", True),
    ("10.1.2.3:8000", "http://10.1.2.3", False),
    ("example", "http://gpu.example", True),
    ("example", "http://notexample", False),
    ("EXAMPLE.", "http://GPU.example.", True),
    (".gpu.example", "http://gpu.example", False),
    ("*.gpu.example", "http://a.gpu.example", True),
    ("gpu.example:443", "https://gpu.example", True),
    ("gpu.example:443", "http://gpu.example", False),
    ("https://gpu.example", "https://gpu.example", True),
    ("https://gpu.example", "http://gpu.example", False),
    ("bücher.example", "http://bücher.example", True),
    ("localhost", "http://localhost:8000", True),
    ("other, gpu.example", SERVICE, True),
    ("other gpu.example", SERVICE, True),
    ("*", SERVICE, True),
    ("other,*", SERVICE, True),
    ("", SERVICE, False),
    ("a:b,[,]:1,%zz,x/8,10.0.0.0/99,fd00::/999,://,.,*., gpu.example/", SERVICE, True),
    ("a:b,[,]:1,%zz,x/8,10.0.0.0/99,fd00::/999,://,.,*.", SERVICE, False),
    (f"a:{'9' * 5000},gpu.example:{'8' * 5000}", SERVICE, False),
]


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
async def proxy() -> AsyncIterator[tuple[str, list[bytes]]]:
    """A proxy that responds itself, its URL without a scheme, and the targets of the requests that reached it."""
    targets: list[bytes] = []

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        targets.append((await reader.readuntil(b"\r\n\r\n")).split(b" ")[1])
        body = json.dumps(JOB).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        writer.close()

    server = await asyncio.start_server(respond, "127.0.0.1", 0)
    yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", targets
    server.close()


@pytest.mark.parametrize(("no_proxy", "url", "exempt"), EXEMPT)
def test_entries_of_no_proxy_exempt_what_they_name(
    no_proxy: str, url: str, exempt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", "http://proxy.example")
    monkeypatch.setenv("NO_PROXY", no_proxy)
    assert Proxies.of_environment().scheme_for(httpx.URL(url)) == (None if exempt else "all")


@pytest.mark.parametrize("no_proxy", sorted({entry for entry, _, _ in EXEMPT} - {"*"}))
@pytest.mark.parametrize("variable", ["HTTP_PROXY", "https_proxy"])
async def test_no_value_of_no_proxy_stops_the_client(
    no_proxy: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", no_proxy)
    monkeypatch.setenv(variable, "http://proxy.example:3128")
    async with AsyncClient(SERVICE):
        pass


async def test_requests_use_the_proxy_but_for_exempt_hosts(
    proxy: tuple[str, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, targets = proxy
    monkeypatch.setenv("HTTP_PROXY", address)
    async with AsyncClient(SERVICE) as api:
        assert (await api.get("job_1")).id == JOB["id"]
    monkeypatch.setenv("NO_PROXY", "127.0.0.0/8")
    async with AsyncClient(f"http://{address}") as api:  # the proxy itself responds
        await api.get("job_1")
    assert targets == [f"{SERVICE}/v1/jobs/job_1".encode(), b"/v1/jobs/job_1"]


async def test_a_proxy_that_does_not_run_is_no_fault_of_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    async with AsyncClient(SERVICE, retries=0) as api:
        with pytest.raises(Unreachable):
            await api.get("job_1")


@pytest.mark.parametrize(
    "value", ["ftp://proxy", "http://", "http://user:secret/x@proxy", "http://proxy:99999", "a b:c", "http://[bad"]
)
@pytest.mark.parametrize("variable", ["HTTP_PROXY", "ALL_PROXY"])
def test_the_error_for_an_unusable_proxy_names_its_variable_only(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(InvalidArgument, match=f"^{variable} in the environment is not the URL of a proxy") as caught:
        AsyncClient(SERVICE)
    assert "secret" not in str(caught.value)


def test_a_socks_proxy_without_its_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "socksio", None)
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:1080")
    with pytest.raises(InvalidArgument, match=r"^ALL_PROXY .*httpx\[socks\]"):
        AsyncClient(SERVICE)


async def test_an_unusable_proxy_stops_only_requests_that_would_use_it(
    proxy: tuple[str, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks4://127.0.0.1:1080")
    monkeypatch.setenv("HTTP_PROXY", proxy[0])
    async with AsyncClient(SERVICE) as api:
        await api.get("job_1")
    monkeypatch.setenv("NO_PROXY", "example")
    async with AsyncClient("https://gpu.example"):
        pass
