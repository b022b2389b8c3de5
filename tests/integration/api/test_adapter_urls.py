"""Adapters by URL and on the hub: fetched before a job is accepted, and then the tenant's own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest
from harness.adapter_host import AdapterHost, Answer, adapter_host
from harness.api_thread import ApiThread
from harness.http_server import BODY, bearer, claimed, deliver, serving
from harness.queue import names_left
from integration.api.adapter_requests import ALLOWED, INK, adapter_of, refusal, submit
from tiny.safetensors_file import demo_lora, file_of

import fusequeue
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
    assert not [name for name in await names_left(queue) if name.startswith("adapter_source")]
    again = await adapter_of(await submit(api, {"url": host.url(f"{INK}?token=secret")}))
    assert again != adapter_id
    assert host.asked(INK) == 2
    output = capsys.readouterr()
    assert "adapter_fetched" in output.out
    assert "secret" not in output.out + output.err
    headers = [head for _, head in host.requests]
    assert not any("authorization" in head or "cookie" in head for head in headers)


async def test_an_embedding_has_its_word_from_its_file_or_its_url(api: httpx.AsyncClient, host: AdapterHost) -> None:
    vectors = ([1, 64], [0.5] * 64)
    host.answers["/EasyNeg.safetensors"] = [Answer(file_of({"emb_params": vectors}))]
    host.answers["/learned.safetensors"] = [Answer(file_of({"<cat>": vectors}))]
    urls = [{"url": host.url(f"/{name}.safetensors")} for name in ("EasyNeg", "learned")]
    assert (await submit(api, *urls)).status_code == 202
    listed = (await api.get("/v1/adapters?order=asc")).json()["data"]
    assert [(one["kind"], one["token"]) for one in listed] == [("embedding", "EasyNeg"), ("embedding", "<cat>")]
    scaled = (await submit(api, {**urls[0], "scale": 0.5})).json()["error"]
    assert (scaled["param"], "has no scale" in scaled["message"]) == ("adapters.0.scale", True)


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


async def test_two_processes_that_fetch_one_file_have_one_adapter(
    queue: Queue, queue_with: Callable[..., Queue], tmp_path: Path, host: AdapterHost
) -> None:
    """The slower one finds the adapter of the other."""
    held = asyncio.Event()
    host.answers[INK] = [Answer(demo_lora(1), held=held), Answer(demo_lora(1))]
    second = queue_with(namespace=queue.client.settings.namespace)
    async with serving(queue, tmp_path, **ALLOWED) as slow, serving(second, tmp_path, **ALLOWED) as fast:
        slower = asyncio.create_task(submit(slow, {"url": host.url(INK)}))
        async with asyncio.timeout(30):
            while not host.requests:
                await asyncio.sleep(0.01)
        adapter_id = await adapter_of(await submit(fast, {"url": host.url(INK)}))
        held.set()
        assert await adapter_of(await slower) == adapter_id
    assert host.asked(INK) == 2


async def test_two_tenants_with_one_url_have_an_adapter_each(
    api: httpx.AsyncClient, host: AdapterHost, queue: Queue
) -> None:
    """Also at the same time."""
    held = asyncio.Event()
    host.answers[INK] = [Answer(demo_lora(1), held=held)]
    keys = [await bearer(queue, tenant) for tenant in ("acme", "other")]
    requests = [asyncio.create_task(submit(api, {"url": host.url(INK)}, headers=key)) for key in keys]
    async with asyncio.timeout(30):
        while len(host.requests) < 2:
            await asyncio.sleep(0.01)
    held.set()
    first, second = [await adapter_of(await request) for request in requests]
    assert (first != second, host.asked(INK)) == (True, 2)
    assert (await api.get(f"/v1/adapters/{first}", headers=keys[1])).status_code == 404
    assert (await submit(api, {"id": first}, headers=keys[1])).status_code == 422


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


async def test_protocols_name_urls_in_their_own_fields(api: httpx.AsyncClient, host: AdapterHost) -> None:
    replicate = {"prompt": "a", "lora_weights": host.url(INK), "lora_scale": 0.5}
    made = await api.post("/compat/replicate/v1/models/fusequeue/demo/predictions", json={"input": replicate})
    assert made.status_code == 201, made.text
    fal = {"prompt": "a", "loras": [{"path": host.url(INK), "scale": 0.8}]}
    queued = await api.post("/compat/fal/fusequeue/demo", json=fal)
    assert queued.status_code == 200, queued.text
    jobs = [(await api.get(f"/v1/jobs/{id_}")).json() for id_ in (made.json()["id"], queued.json()["request_id"])]
    ((first,), (second,)) = [job["adapters"] for job in jobs]
    assert (first["id"] == second["id"], first["scale"], second["scale"]) == (True, 0.5, 0.8)
    image = {"model": "demo", "prompt": "a", "size": "64x64", "loras": [{"path": host.url("/none"), "scale": 0.8}]}
    refused = await api.post("/v1/images/generations", json=image)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "adapters.0.url"), refused.text
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
