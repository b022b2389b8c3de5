"""Adapters by URL that are not fetched, or whose file cannot be used: hosts, addresses, redirects, files, limits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest
from harness.adapter_host import AdapterHost, Answer, adapter_host
from harness.http_server import BODY, ROOT, serving
from integration.api.adapter_requests import ALLOWED, INK, adapter_of, refusal, submit
from tiny.safetensors_file import demo_lora, file_of

from shared.queue import Queue


@pytest.fixture
async def host() -> AsyncIterator[AdapterHost]:
    async with adapter_host() as host:
        host.answers[INK] = [Answer(demo_lora(1), etag='"1"')]
        yield host


@pytest.fixture
async def api(queue: Queue, tmp_path: Path, host: AdapterHost) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(queue, tmp_path, **ALLOWED, adapter_hub_url=host.url("/hub")) as client:
        yield client


async def test_a_slow_host_is_an_error_that_can_be_repeated(queue: Queue, tmp_path: Path, host: AdapterHost) -> None:
    host.answers[INK] = [Answer(held=asyncio.Event())]
    async with serving(queue, tmp_path, **ALLOWED, adapter_fetch_timeout_s=0.2) as api:
        error = await refusal(api, {"url": host.url(INK)})
    assert error["code"] == "url_not_fetched"


async def test_a_redirect_is_followed_to_allowed_hosts_only(api: httpx.AsyncClient, host: AdapterHost) -> None:
    host.answers["/here"] = [Answer(status=302, location=host.url(f"{INK}?signature={'x' * 3000}"))]
    host.answers["/below"] = [Answer(status=302, location=INK)]
    host.answers["/away"] = [Answer(status=302, location=host.url(INK, "127.0.0.2"))]
    host.answers["/inside"] = [Answer(status=302, location="http://10.0.0.1/x")]
    host.answers["/loop"] = [Answer(status=302, location="/loop")]
    for path in ("/here", "/below"):
        await adapter_of(await submit(api, {"url": host.url(path)}))
    error = await refusal(api, {"url": host.url("/away")})
    assert "127.0.0.2; the operator allows in FUSEQUEUE_ADAPTER_HOSTS: 127.0.0.1" in error["message"]
    assert "10.0.0.1" in (await refusal(api, {"url": host.url("/inside")}))["message"]
    assert "more than 5 times" in (await refusal(api, {"url": host.url("/loop")}))["message"]


REFUSED = [
    ("http://files.example/a.safetensors", "files.example; the operator allows in FUSEQUEUE_ADAPTER_HOSTS: 127.0.0.1"),
    ("http://127.0.0.1.files.example/a.safetensors", "FUSEQUEUE_ADAPTER_HOSTS"),
    ("http://user:secret@127.0.0.1/a.safetensors", "must not have a user or password"),
    ("http://10.0.0.1/a.safetensors", "a private address"),
    ("ftp://127.0.0.1/a.safetensors", "https://"),
    ("ink.safetensors", "https://"),
]


@pytest.mark.parametrize(("url", "words"), REFUSED, ids=[url for url, _ in REFUSED])
async def test_a_url_that_is_not_allowed_is_not_requested(
    api: httpx.AsyncClient, host: AdapterHost, url: str, words: str
) -> None:
    error = await refusal(api, {"url": url})
    assert words in error["message"]
    assert "secret" not in json.dumps(error)
    assert (error["code"], host.requests) == ("invalid_adapter", [])


async def test_a_host_is_refused_together_with_other_faults(api: httpx.AsyncClient) -> None:
    body = {**BODY, "steps": 10_000, "adapters": [{"url": "https://files.example/a.safetensors"}]}
    errors = (await api.post("/v1/jobs", json=body)).json()["errors"]
    assert {error["param"] for error in errors} == {"steps", "adapters.0.url"}


async def test_a_model_without_uploads_takes_no_urls(queue: Queue, tmp_path: Path, host: AdapterHost) -> None:
    models = tmp_path / "models.toml"
    text = (ROOT / "models.toml").read_text().replace('"demo/model"', f'"{ROOT}/demo/model"')
    models.write_text(text.replace("compile = false", "compile = true", 1))
    async with serving(queue, tmp_path, **ALLOWED, models=models) as api:
        assert "'demo' takes no other adapters" in (await refusal(api, {"url": host.url(INK)}))["message"]
    assert host.requests == []


async def test_an_allowed_name_of_a_private_address_is_refused(queue: Queue, tmp_path: Path, host: AdapterHost) -> None:
    """The list of hosts does not open networks."""
    settings = {**ALLOWED, "adapter_hosts": ("localhost",), "fetch_allow_networks": ()}
    async with serving(queue, tmp_path, **settings) as api:
        assert "localhost is a loopback address" in (await refusal(api, {"url": host.url(INK, "localhost")}))["message"]
    assert host.requests == []


async def test_without_the_setting_nothing_is_fetched(queue: Queue, tmp_path: Path, host: AdapterHost) -> None:
    async with serving(queue, tmp_path, **{**ALLOWED, "adapter_hosts": ()}, adapter_hub_url=host.url("/hub")) as api:
        for adapter in ({"url": host.url(INK)}, {"hub": "owner/ink"}):
            assert "FUSEQUEUE_ADAPTER_HOSTS: none" in (await refusal(api, adapter))["message"]
    assert host.requests == []


FILES = {
    "too long": (Answer(bytes(60_000)), "invalid_adapter", "more than 50000 bytes"),
    "no safetensors": (Answer(b"<html>not here</html>"), "invalid_adapter", "no safetensors file"),
    "rank": (Answer(file_of({"a.lora_A.weight": ([600, 2], [0.0] * 1200)})), "invalid_adapter", "has rank 600"),
    "404": (Answer(status=404), "invalid_adapter", "status 404"),
    "503": (Answer(status=503), "url_not_fetched", "status 503"),
}


@pytest.mark.parametrize("name", FILES)
async def test_a_file_that_cannot_be_used_names_the_field(
    api: httpx.AsyncClient, host: AdapterHost, name: str, tmp_path: Path
) -> None:
    answer, code, words = FILES[name]
    host.answers[INK] = [answer]
    error = await refusal(api, {"url": host.url(INK)})
    assert (error["code"], words in error["message"]) == (code, True), error
    assert (await api.get("/v1/adapters")).json()["data"] == []
    assert not list((tmp_path / "storage").rglob("*.part"))
    assert (await api.get("/v1/jobs")).json()["data"] == []


async def test_a_host_that_was_busy_is_asked_again(api: httpx.AsyncClient, host: AdapterHost) -> None:
    host.answers[INK].insert(0, Answer(status=503))
    assert (await refusal(api, {"url": host.url(INK)}))["code"] == "url_not_fetched"
    await adapter_of(await submit(api, {"url": host.url(INK)}))


async def test_a_tenant_with_all_its_adapters_gets_no_more(
    queue_with: Callable[..., Queue], tmp_path: Path, host: AdapterHost
) -> None:
    host.answers["/oil.safetensors"] = [Answer(demo_lora(2))]
    async with serving(queue_with(max_adapters_per_tenant=1), tmp_path, **ALLOWED) as api:
        await adapter_of(await submit(api, {"url": host.url(INK)}))
        refused = await submit(api, {"url": host.url("/oil.safetensors")})
        assert (refused.status_code, refused.json()["code"]) == (409, "conflict")
