"""Adapters by URL and on the hub: fetched from allowed hosts before a job is accepted, and then the tenant's own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.adapter_host import AdapterHost, Answer, adapter_host
from harness.api_thread import ApiThread
from harness.http_server import BODY, ROOT, bearer, claimed, deliver, serving
from tiny.safetensors_file import demo_lora, file_of

import fusequeue
from shared.queue import Queue

ALLOWED: dict[str, Any] = {
    "adapter_hosts": ("127.0.0.1",),
    "fetch_allow_networks": (ip_network("127.0.0.0/8"),),
    "fetch_allow_http": True,
    "fetch_ports": tuple(range(1, 65_536)),
    "max_adapter_bytes": 50_000,
}
INK = "/ink.safetensors"


@pytest.fixture
async def host() -> AsyncIterator[AdapterHost]:
    async with adapter_host() as host:
        host.answers[INK] = [Answer(demo_lora(1), etag='"1"')]
        yield host


@pytest.fixture
async def api(queue: Queue, tmp_path: Path, host: AdapterHost) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(queue, tmp_path, **ALLOWED, adapter_hub_url=host.url("/hub")) as client:
        yield client


async def submit(api: httpx.AsyncClient, *adapters: dict[str, Any], **options: Any) -> httpx.Response:
    return await api.post("/v1/jobs", json={**BODY, "adapters": list(adapters)}, **options)


async def adapter_of(response: httpx.Response) -> str:
    assert response.status_code == 202, response.text
    (adapter,) = response.json()["adapters"]
    assert adapter["id"].startswith("adapter_")
    return str(adapter["id"])


async def refusal(api: httpx.AsyncClient, adapter: dict[str, Any]) -> dict[str, Any]:
    response = await submit(api, adapter)
    assert response.status_code == 422, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error["param"] == f"adapters.0.{'url' if 'url' in adapter else 'hub'}", error
    assert error["message"].startswith(error["param"]), error
    return error


async def test_a_url_becomes_an_adapter_of_the_tenant(
    api: httpx.AsyncClient, host: AdapterHost, queue: Queue, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is listed with its source, without the query, used by the job, and deleted like an upload."""
    response = await submit(api, {"url": host.url(f"{INK}?token=secret"), "scale": -3.5})
    adapter_id = await adapter_of(response)
    assert response.json()["adapters"] == [{"id": adapter_id, "scale": -3.5}]
    (listed,) = (await api.get("/v1/adapters")).json()["data"]
    assert (listed["id"], listed["name"], listed["model"]) == (adapter_id, "ink.safetensors", "demo")
    assert (listed["source"], listed["bytes"]) == (host.url(INK), len(demo_lora(1)))
    stored = b"".join(path.read_bytes() for path in sorted((tmp_path / "storage/adapters").rglob("*.part")))
    assert stored == demo_lora(1)
    assert (await api.delete(f"/v1/adapters/{adapter_id}")).status_code == 409
    claim = await claimed(queue, response.json()["id"])
    assert claim.job.adapters[0].id == adapter_id
    await deliver(queue, tmp_path, claim)
    assert (await api.delete(f"/v1/adapters/{adapter_id}")).status_code == 204
    assert not [name async for name in queue.client.redis.scan_iter("*adapter_source*")]
    again = await adapter_of(await submit(api, {"url": host.url(f"{INK}?token=secret")}))
    assert again != adapter_id
    assert host.asked(INK) == 2
    output = capsys.readouterr()
    assert "adapter_fetched" in output.out
    assert "secret" not in output.out + output.err
    headers = [head for _, head in host.requests]
    assert not any("authorization" in head or "cookie" in head for head in headers)


async def test_a_url_is_fetched_once_while_it_is_fresh(api: httpx.AsyncClient, host: AdapterHost) -> None:
    first = await adapter_of(await submit(api, {"url": host.url(INK)}))
    host.answers[INK] = [Answer(status=503)]
    assert await adapter_of(await submit(api, {"url": host.url(INK), "scale": 0.5})) == first
    assert host.asked(INK) == 1


async def test_a_url_that_is_due_is_compared_by_its_etag(queue: Queue, tmp_path: Path, host: AdapterHost) -> None:
    """An unchanged file is not sent again, and a changed one is another adapter; jobs of the first keep theirs."""
    async with serving(queue, tmp_path, **ALLOWED, adapter_recheck_s=0.0) as api:
        first = await adapter_of(await submit(api, {"url": host.url(INK)}))
        assert await adapter_of(await submit(api, {"url": host.url(INK)})) == first
        assert host.requests[-1][1]["if-none-match"] == '"1"'
        host.answers[INK] = [Answer(demo_lora(1), etag='"same bytes"')]
        assert await adapter_of(await submit(api, {"url": host.url(INK)})) == first
        host.answers[INK] = [Answer(demo_lora(2), etag='"2"')]
        second = await adapter_of(await submit(api, {"url": host.url(INK)}))
        assert second != first
        assert await adapter_of(await submit(api, {"url": host.url(INK)})) == second
        assert {one["id"] for one in (await api.get("/v1/adapters")).json()["data"]} == {first, second}


async def test_requests_for_one_url_at_the_same_time_share_a_fetch(api: httpx.AsyncClient, host: AdapterHost) -> None:
    held = asyncio.Event()
    host.answers[INK] = [Answer(demo_lora(1), held=held)]
    requests = [asyncio.create_task(submit(api, {"url": host.url(INK)})) for _ in range(8)]
    async with asyncio.timeout(30):
        while not host.requests:
            await asyncio.sleep(0.01)
    held.set()
    ids = {await adapter_of(await request) for request in requests}
    assert (len(ids), host.asked(INK)) == (1, 1)


async def test_a_fetch_goes_on_when_its_request_has_no_time_left(
    queue: Queue, tmp_path: Path, host: AdapterHost
) -> None:
    """The client is told to send it again, and then the adapter is there."""
    held = asyncio.Event()
    host.answers[INK] = [Answer(demo_lora(1), held=held)]
    async with serving(queue, tmp_path, **ALLOWED, adapter_fetch_timeout_s=5.0) as api:
        leaving = asyncio.create_task(submit(api, {"url": host.url(INK)}))
        async with asyncio.timeout(30):
            while not host.requests:
                await asyncio.sleep(0.01)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        held.set()
        await adapter_of(await submit(api, {"url": host.url(INK)}))
        assert host.asked(INK) == 1


async def test_a_slow_host_is_an_error_that_can_be_repeated(queue: Queue, tmp_path: Path, host: AdapterHost) -> None:
    host.answers[INK] = [Answer(held=asyncio.Event())]
    async with serving(queue, tmp_path, **ALLOWED, adapter_fetch_timeout_s=0.2) as api:
        error = await refusal(api, {"url": host.url(INK)})
    assert error["code"] == "url_not_fetched"


async def test_two_tenants_with_one_url_have_an_adapter_each(
    api: httpx.AsyncClient, host: AdapterHost, queue: Queue
) -> None:
    keys = [await bearer(queue, tenant) for tenant in ("acme", "other")]
    first, second = [await adapter_of(await submit(api, {"url": host.url(INK)}, headers=key)) for key in keys]
    assert (first != second, host.asked(INK)) == (True, 2)
    assert (await api.get(f"/v1/adapters/{first}", headers=keys[1])).status_code == 404
    assert (await submit(api, {"id": first}, headers=keys[1])).status_code == 422


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


async def test_a_repository_of_the_hub_names_its_file(api: httpx.AsyncClient, host: AdapterHost) -> None:
    """A commit is never compared again; a branch is, when it is due."""
    listing = {"siblings": [{"rfilename": "README.md"}, {"rfilename": "v1/ink one.safetensors"}]}
    commit = 40 * "a"
    host.answers["/hub/api/models/owner/ink/revision/main"] = [Answer(json.dumps(listing).encode())]
    host.answers["/hub/owner/ink/resolve/main/v1/ink%20one.safetensors"] = [Answer(demo_lora(1))]
    host.answers[f"/hub/owner/ink/resolve/{commit}/b.safetensors"] = [Answer(demo_lora(2))]
    first = await adapter_of(await submit(api, {"hub": "owner/ink"}))
    assert await adapter_of(await submit(api, {"hub": "owner/ink"})) == first
    pinned = await adapter_of(await submit(api, {"hub": "owner/ink", "file": "b.safetensors", "revision": commit}))
    assert (pinned != first, len(host.requests)) == (True, 3)
    names = {one["id"]: one["source"] for one in (await api.get("/v1/adapters")).json()["data"]}
    assert names[pinned] == host.url(f"/hub/owner/ink/resolve/{commit}/b.safetensors")
    listing["siblings"].append({"rfilename": "v2/ink.safetensors"})
    host.answers["/hub/api/models/owner/two/revision/main"] = [Answer(json.dumps(listing).encode())]
    assert "name one as file" in (await refusal(api, {"hub": "owner/two"}))["message"]


async def test_a_commit_of_the_hub_is_asked_for_once(queue: Queue, tmp_path: Path, host: AdapterHost) -> None:
    path = f"/hub/owner/ink/resolve/{40 * 'b'}/ink.safetensors"
    host.answers[path] = [Answer(demo_lora(1))]
    choice = {"hub": "owner/ink", "file": "ink.safetensors", "revision": 40 * "b"}
    async with serving(queue, tmp_path, **ALLOWED, adapter_hub_url=host.url("/hub"), adapter_recheck_s=0.0) as api:
        assert await adapter_of(await submit(api, choice)) == await adapter_of(await submit(api, choice))
    assert host.asked(path) == 1


async def test_a_fetched_adapter_is_deleted_when_nobody_names_its_url_or_uses_it(
    queue: Queue, tmp_path: Path, host: AdapterHost
) -> None:
    client = queue.client
    async with serving(queue, tmp_path, **ALLOWED) as api:
        response = await submit(api, {"url": host.url(INK)})
        adapter_id = await adapter_of(response)
        row = f"adapter|default|{adapter_id}||"
        (name,) = [one for one in await client.redis.zrange(client.redis_keys.retention, 0, -1) if one.startswith(row)]
        await client.redis.zadd(client.redis_keys.retention, {name: 1})
        assert await queue.maintenance.expired_items() == [], "a queued job uses it"
        await api.post(f"/v1/jobs/{response.json()['id']}/cancel")
        await client.redis.zadd(client.redis_keys.retention, {name: 1})
        (item,) = await queue.maintenance.expired_items()
        assert (item.kind, item.id) == ("adapter", adapter_id)
        assert (await api.get(f"/v1/adapters/{adapter_id}")).status_code == 404
        await queue.maintenance.forget_item(item)
        assert await adapter_of(await submit(api, {"url": host.url(INK)})) != adapter_id


async def test_a_repeated_request_with_its_key_fetches_nothing(queue: Queue, tmp_path: Path, host: AdapterHost) -> None:
    async with serving(queue, tmp_path, **ALLOWED, adapter_recheck_s=0.0) as api:
        key = {"Idempotency-Key": "one"}
        first = await submit(api, {"url": host.url(INK)}, headers=key)
        host.answers[INK] = [Answer(status=404)]
        again = await submit(api, {"url": host.url(INK)}, headers=key)
    assert (again.json()["id"], host.asked(INK)) == (first.json()["id"], 1)


async def test_lines_of_a_bulk_request_name_adapters_by_url(api: httpx.AsyncClient, host: AdapterHost) -> None:
    urls = [host.url(INK), host.url("/none"), host.url(INK)]
    lines = "\n".join(json.dumps({**BODY, "adapters": [{"url": url}]}) for url in urls)
    response = await api.post("/v1/jobs:bulk", content=lines, headers={"Content-Type": "application/x-ndjson"})
    first, second, third = map(json.loads, response.text.splitlines())
    assert second["error"]["param"] == "adapters.0.url"
    jobs = [(await api.get(f"/v1/jobs/{one['id']}")).json() for one in (first, third)]
    assert jobs[0]["adapters"] == jobs[1]["adapters"]
    assert host.asked(INK) == 1


async def test_a_tenant_with_all_its_adapters_gets_no_more(
    queue_with: Callable[..., Queue], tmp_path: Path, host: AdapterHost
) -> None:
    host.answers["/oil.safetensors"] = [Answer(demo_lora(2))]
    async with serving(queue_with(max_adapters_per_tenant=1), tmp_path, **ALLOWED) as api:
        await adapter_of(await submit(api, {"url": host.url(INK)}))
        refused = await submit(api, {"url": host.url("/oil.safetensors")})
        assert (refused.status_code, refused.json()["code"]) == (409, "conflict")


async def test_protocols_name_urls_in_their_own_fields(api: httpx.AsyncClient, host: AdapterHost) -> None:
    host.answers["/hub/owner/ink/resolve/main/a.safetensors"] = [Answer(demo_lora(1))]
    replicate = {"prompt": "a", "lora_weights": host.url(INK), "lora_scale": 0.5}
    made = await api.post("/compat/replicate/v1/models/fusequeue/demo/predictions", json={"input": replicate})
    assert made.status_code == 201, made.text
    fal = {"prompt": "a", "loras": [{"path": host.url(INK), "scale": 0.8}]}
    queued = await api.post("/compat/fal/fusequeue/demo", json=fal)
    assert queued.status_code == 200, queued.text
    jobs = [(await api.get(f"/v1/jobs/{id_}")).json() for id_ in (made.json()["id"], queued.json()["request_id"])]
    ((first,), (second,)) = [job["adapters"] for job in jobs]
    assert (first["id"] == second["id"], first["scale"], second["scale"]) == (True, 0.5, 0.8)
    for path in ("http://files.example/a.safetensors", host.url("/none")):
        refused = await api.post("/compat/fal/fusequeue/demo", json={"prompt": "a", "loras": [{"path": path}]})
        (detail,) = refused.json()["detail"]
        assert (refused.status_code, detail["loc"]) == (422, ["body", "loras", "0", "path"]), detail
        assert detail["msg"].startswith("loras.0.path: "), detail


async def test_the_python_client_names_a_url(serve: Callable[..., ApiThread], host: AdapterHost) -> None:
    server = serve(**ALLOWED)
    async with fusequeue.AsyncClient(server.url) as client:
        job = await client.submit("demo", "a red circle", adapters=[{"url": host.url(INK), "scale": 0.8}])
        (adapter,) = job.adapters
        assert (adapter.scale, (await client.adapters.get(adapter.id)).source) == (0.8, host.url(INK))
        with pytest.raises(fusequeue.ClientError, match=r"adapters\.0\.url: host not allowed: files\.example"):
            await client.submit("demo", "a", adapters=[{"url": "http://files.example/a.safetensors"}])
