"""Keys, scopes, limits and signed URLs on every route."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import structlog
from harness.http_server import BODY, WORKER, StreamingCall, bearer, claimed, finish, paths, png, serving
from harness.tables import row

from api import auth, context
from api.routes import events
from shared.auth import Scope, TenantLimits, new_token
from shared.queue import Queue
from shared.queue.checkpoints import JobCheckpoint, StoredImage, checkpoint_key
from shared.webhooks import SigningSecret, WebhookEndpoint, new_secret

ALL = frozenset(Scope)
OPEN = {"/", "/health", "/healthz", "/readyz", "/docs", "/openapi.json"}
PAGE_FILES = {"/page/x/x", "/docs/x/x"}


@pytest.fixture
async def api(fake_queue: Queue, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    # All URLs signed within one such life end at once: none begins while a test runs.
    async with serving(fake_queue, tmp_path, auth="keys", presign_expires_s=10**9) as client:
        yield client


def code(response: httpx.Response) -> tuple[int, str]:
    if response.headers["content-type"] == "application/json":  # that of fal
        return response.status_code, response.json()["error_type"]
    assert response.headers["content-type"] == "application/problem+json", response.text
    return response.status_code, response.json()["code"]


def routes(queue: Queue, folder: Path) -> list[tuple[str, str]]:
    """Return every method and path, with its parameters filled in."""
    filled = {"{index}": "0", "{job_id}": "job_" + "0" * 26}
    return [
        (method, re.sub(r"\{.*?\}", lambda found: filled.get(found[0], "x"), path))
        for method, path in paths(queue, folder)
    ]


async def test_only_open_routes_respond_without_a_key(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path
) -> None:
    """This covers routes added later."""
    seen = routes(fake_queue, tmp_path)
    assert len(seen) > 14
    assert {path for _, path in seen} > OPEN | {"/v1/jobs", "/v1/jobs:bulk", "/v1/inputs", "/metrics"}
    for method, path in seen:
        response = await api.request(method, path)
        if path in OPEN:
            assert response.status_code == 200, path
        elif path in PAGE_FILES:
            assert response.status_code == 404, "no such file, with a key too"
        elif method == "HEAD":
            assert response.status_code == 401, path
        else:
            assert code(response) == (401, "missing_api_key"), path
            assert response.headers["www-authenticate"] == 'Bearer realm="fusequeue"'


SCHEMES = ["Bearer", "bearer", "Key", "Token", "KEY"]


async def test_all_schemes_of_clients_are_accepted(api: httpx.AsyncClient, fake_queue: Queue) -> None:
    for scheme in SCHEMES:
        with row(scheme):
            token, _ = await fake_queue.api_keys.create("acme", ALL)
            assert (await api.get("/v1/jobs", headers={"Authorization": f"{scheme} {token}"})).status_code == 200


async def test_an_invalid_key_is_refused_and_not_repeated(api: httpx.AsyncClient, fake_queue: Queue) -> None:
    token, _ = await fake_queue.api_keys.create("acme", ALL)
    wrong = [f"Basic {token}", token, "Bearer", "Bearer ", f"Bearer {token}x", f"Bearer {new_token()}", "Bearer sk-1"]
    wrong += [f"Bearer {token[:-1]}", f"Bearer {token} {token}", f"Bearer {token.swapcase()}", "Bearer \u00e9"]
    for header in wrong:
        response = await api.get("/v1/jobs", headers={"Authorization": header.encode("latin-1")})
        assert code(response) == (401, "invalid_api_key"), header
        assert response.headers["www-authenticate"] == 'Bearer realm="fusequeue", error="invalid_token"'
        assert response.json()["error"]["type"] == "authentication_error"
        assert token not in response.text
        assert token[13:-2] not in response.text
    twice = [("Authorization", f"Bearer {token}"), ("Authorization", f"Bearer {token}")]
    assert code(await api.get("/v1/jobs", headers=twice)) == (401, "invalid_api_key")


async def test_no_log_contains_a_key_or_the_signature_of_a_url(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path
) -> None:
    token, _ = await fake_queue.api_keys.create("acme", ALL)
    header = {"Authorization": f"Bearer {token}"}
    with structlog.testing.capture_logs() as lines:
        job_id = (await api.post("/v1/jobs", json=BODY, headers=header)).json()["id"]
        await finish(fake_queue, tmp_path, job_id)
        url = httpx.URL((await api.get(f"/v1/jobs/{job_id}", headers=header)).json()["artifacts"][0]["url"])
        await api.get(url)
        await api.get(url.copy_set_param("expires", 5))
        await api.get("/v1/jobs", headers={"Authorization": f"Bearer {token}x"})
        await api.get(f"/v1/jobs/{token}", headers=header)
    assert len(lines) > 5
    for secret in (token, token[13:-6], url.params["signature"]):
        assert secret not in repr(lines)


async def test_a_key_with_a_known_id_and_another_secret_is_refused(api: httpx.AsyncClient, fake_queue: Queue) -> None:
    """Lists show ids: knowing one must not help, even while the real key is cached."""
    token, key = await fake_queue.api_keys.create("acme", ALL)
    assert (await api.get("/v1/jobs", headers={"Authorization": f"Bearer {token}"})).status_code == 200
    from shared.auth import _checksum

    body = key.id + "0" * 32
    forged = f"fq_{body}{_checksum(body)}"
    assert code(await api.get("/v1/jobs", headers={"Authorization": f"Bearer {forged}"})) == (401, "invalid_api_key")


async def test_errors_name_expired_and_revoked_keys(
    api: httpx.AsyncClient, fake_queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "CACHE_S", 0.0)
    header = await bearer(fake_queue, lives_s=60)
    assert (await api.get("/v1/jobs", headers=header)).status_code == 200
    (key,) = await fake_queue.api_keys.all()
    await fake_queue.client.redis.hset(fake_queue.client.redis_keys.api_key(key.id), "expires", key.created_at_ms)
    assert code(await api.get("/v1/jobs", headers=header)) == (401, "expired_api_key")
    await fake_queue.api_keys.revoke(key.id)
    revoked = await api.get("/v1/jobs", headers=header)
    assert code(revoked) == (401, "invalid_api_key")
    assert "revoked" in revoked.json()["detail"]


async def test_a_key_is_cached_and_refused_two_seconds_after_its_revocation(
    api: httpx.AsyncClient, fake_queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(auth.time, "monotonic", lambda: clock[0])
    reads: list[str] = []

    def count(name: str) -> None:
        method = getattr(fake_queue.api_keys, name)

        async def counted(*args: Any) -> Any:
            reads.append(name)
            return await method(*args)

        monkeypatch.setattr(fake_queue.api_keys, name, counted)

    for name in ("identify", "note_use", "admit"):
        count(name)
    header = await bearer(fake_queue)
    for _ in range(20):
        assert (await api.get("/v1/models", headers=header)).status_code == 200
    assert (reads.count("identify"), reads.count("note_use"), reads.count("admit")) == (1, 1, 0)
    await fake_queue.api_keys.revoke((await fake_queue.api_keys.all())[0].id)
    clock[0] += auth.CACHE_S
    assert code(await api.get("/v1/models", headers=header)) == (401, "invalid_api_key")
    assert auth.CACHE_S <= 2.0


@pytest.mark.parametrize(
    ("path", "begins", "ends"),
    [
        ("/v1/jobs/{job_id}/events", '"status":"queued"', '"status":"queued"'),
        ("/compat/replicate/v1/predictions/{job_id}/stream", "event: logs", "the API key fq_"),
    ],
)
async def test_a_stream_ends_when_its_key_is_revoked(
    api: httpx.AsyncClient, fake_queue: Queue, monkeypatch: pytest.MonkeyPatch, path: str, begins: str, ends: str
) -> None:
    """A stream of a long job must not outlive the permission to read the job."""
    monkeypatch.setattr(auth, "CACHE_S", 0.0)
    header = await bearer(fake_queue)
    job_id = (await api.post("/v1/jobs", json=BODY, headers=header)).json()["id"]
    url = path.format(job_id=job_id)
    reader = StreamingCall(api, url, header)
    await reader.wait_for(begins)
    await reader.wait_for(": keep-alive")
    await fake_queue.api_keys.revoke((await fake_queue.api_keys.all())[0].id)
    assert ends in await reader.read_all()
    assert code(await api.get(url, headers=header)) == (401, "invalid_api_key")


async def test_concurrent_requests_read_a_key_once(
    api: httpx.AsyncClient, fake_queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read occupies one of few connections to Redis, and many streams connect at once when an API returns."""
    headers = await bearer(fake_queue)
    reads = []
    identify = fake_queue.api_keys.identify

    async def counted(key_id: str | None, tenant: str) -> Any:
        reads.append(key_id)
        await asyncio.sleep(0.05)  # as long as it takes: the other requests arrive meanwhile
        return await identify(key_id, tenant)

    monkeypatch.setattr(fake_queue.api_keys, "identify", counted)
    responses = await asyncio.gather(*(api.get("/v1/jobs", headers=headers) for _ in range(50)))
    assert {response.status_code for response in responses} == {200}
    assert len(reads) == len(set(reads)) == 1
    other = await bearer(fake_queue)
    canceled = [asyncio.create_task(api.get("/v1/jobs", headers=other)) for _ in range(3)]
    await asyncio.sleep(0.01)
    canceled[0].cancel()
    assert [one.status_code for one in await asyncio.gather(*canceled[1:])] == [200, 200]


async def test_the_use_of_a_key_is_recorded(api: httpx.AsyncClient, fake_queue: Queue) -> None:
    header = await bearer(fake_queue)
    assert (await fake_queue.api_keys.all())[0].last_used_at_ms is None
    await api.get("/v1/models", headers=header)
    assert (await fake_queue.api_keys.all())[0].last_used_at_ms is not None


CHANGES = [("POST", f"/v1/jobs:{name}") for name in ("cancel", "update", "retry")] + [("DELETE", "/v1/jobs")]
NEEDS = [
    ("GET", "/v1/jobs", Scope.JOBS_READ),
    ("GET", "/v1/jobs/job_00000000000000000000000000", Scope.JOBS_READ),
    ("GET", "/v1/jobs/job_00000000000000000000000000/events", Scope.JOBS_READ),
    ("GET", "/v1/jobs/job_00000000000000000000000000/artifacts/0", Scope.JOBS_READ),
    ("GET", "/v1/models", Scope.JOBS_READ),
    ("POST", "/v1/jobs", Scope.JOBS_WRITE),
    ("POST", "/v1/jobs:bulk", Scope.JOBS_WRITE),
    ("POST", "/v1/inputs", Scope.JOBS_WRITE),
    ("POST", "/compat/huggingface/demo", Scope.JOBS_WRITE),
    ("GET", "/compat/replicate/v1/predictions", Scope.JOBS_READ),
    ("POST", "/compat/replicate/v1/predictions", Scope.JOBS_WRITE),
    ("POST", "/compat/replicate/v1/files", Scope.JOBS_WRITE),
    ("POST", "/v1/jobs/job_00000000000000000000000000/cancel", Scope.JOBS_WRITE),
    ("POST", "/v1/jobs/job_00000000000000000000000000/pause", Scope.JOBS_WRITE),
    ("GET", "/v1/webhooks", Scope.JOBS_READ),
    ("GET", "/v1/webhooks/secret", Scope.JOBS_WRITE),
    ("POST", "/v1/webhooks/secret/rotate", Scope.JOBS_WRITE),
    ("POST", "/v1/webhooks/x/rotate", Scope.JOBS_WRITE),
    ("GET", "/compat/replicate/v1/webhooks/default/secret", Scope.JOBS_WRITE),
    ("DELETE", "/v1/jobs/job_00000000000000000000000000", Scope.JOBS_WRITE),
    ("PATCH", "/v1/jobs/job_00000000000000000000000000", Scope.JOBS_WRITE),
    ("POST", "/v1/jobs/job_00000000000000000000000000/retry", Scope.JOBS_WRITE),
    ("DELETE", "/v1/jobs/job_00000000000000000000000000?tenant=other", Scope.ADMIN),
    ("PATCH", "/v1/jobs/job_00000000000000000000000000?tenant=other", Scope.ADMIN),
    ("GET", "/v1/jobs", Scope.JOBS_READ),
    ("GET", "/v1/jobs?tenant=other", Scope.ADMIN),
    ("GET", "/v1/jobs/job_00000000000000000000000000?tenant=other", Scope.ADMIN),
    ("POST", "/v1/jobs:cancel?status=queued", Scope.JOBS_WRITE),
    ("POST", "/v1/jobs:update?status=queued", Scope.JOBS_WRITE),
    ("POST", "/v1/jobs:retry?status=failed", Scope.JOBS_WRITE),
    ("DELETE", "/v1/jobs?status=failed", Scope.JOBS_WRITE),
    *((method, f"{path}?status=failed&tenant=other", Scope.ADMIN) for method, path in CHANGES),
    ("GET", "/v1/queues", Scope.ADMIN),
    ("GET", "/v1/workers", Scope.ADMIN),
    ("GET", "/v1/dead-letters", Scope.ADMIN),
    ("GET", "/v1/dead-letters/x", Scope.ADMIN),
    ("POST", "/v1/dead-letters/x/redrive", Scope.ADMIN),
    ("DELETE", "/v1/dead-letters/x", Scope.ADMIN),
    ("POST", "/v1/dead-letters:redrive?reason=x", Scope.ADMIN),
    ("POST", "/v1/dead-letters:purge?reason=x", Scope.ADMIN),
]


async def test_a_missing_scope_is_named(api: httpx.AsyncClient, fake_queue: Queue) -> None:
    for method, path, needed in NEEDS:
        with row(method, path):
            response = await api.request(method, path, headers=await bearer(fake_queue, scopes=ALL - {needed}))
            assert code(response) == (403, "permission_denied")
            assert f"the scope {needed.value}" in response.json()["detail"]
            enough = await api.request(method, path, headers=await bearer(fake_queue, scopes=frozenset({needed})))
            assert enough.status_code not in (401, 403)


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_the_error_of_an_operators_key_asks_for_a_tenant(
    api: httpx.AsyncClient, fake_queue: Queue, method: str
) -> None:
    """It has no jobs of its own to read; without the scope admin, a tenant's name would not help."""
    for scope, helps in ((Scope.ADMIN, True), (Scope.METRICS, False)):
        header = await bearer(fake_queue, scopes=frozenset({scope}))
        for path in ("/v1/jobs?status=failed", f"/v1/jobs/job_{'0' * 26}"):
            refused = await api.request(method, path, headers=header)
            assert code(refused) == (403, "permission_denied")
            assert ("name a tenant in `tenant`" in refused.json()["detail"]) == helps


MONITORING = ["/metrics", "/v1/scale/default"]


async def test_monitoring_needs_the_scope_metrics(api: httpx.AsyncClient, fake_queue: Queue) -> None:
    """A key of Prometheus or KEDA reads figures, and neither workers nor jobs of tenants."""
    for path in MONITORING:
        with row(path):
            enough = {Scope.METRICS, Scope.ADMIN}
            response = await api.get(path, headers=await bearer(fake_queue, scopes=ALL - enough))
            assert code(response) == (403, "permission_denied")
            assert "the scope metrics or admin" in response.json()["detail"]
            for scope in enough:
                response = await api.get(path, headers=await bearer(fake_queue, scopes=frozenset({scope})))
                assert response.status_code in (200, 404), "404: another pool's"
            only = await bearer(fake_queue, scopes=frozenset({Scope.METRICS}))
            for other in ("/v1/workers", "/v1/queues", "/v1/dead-letters", "/v1/jobs", "/v1/models"):
                assert code(await api.get(other, headers=only)) == (403, "permission_denied"), other


async def test_a_key_that_only_reads_sees_no_signing_secret(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path
) -> None:
    """With one, it could sign events that a receiver believes. This covers routes added later."""
    secrets = (SigningSecret(secret=new_secret()),)
    endpoint = WebhookEndpoint(id="we_1", url="https://a.example", states=(), secrets=secrets, created_at_ms=1)
    await fake_queue.webhooks.create_endpoint("acme", endpoint)
    await fake_queue.webhooks.account_secrets("acme")
    delivery = await fake_queue.webhooks.send_test("acme", endpoint, "event")
    reader = await bearer(fake_queue, scopes=frozenset({Scope.JOBS_READ}))
    for method, path in routes(fake_queue, tmp_path):
        if method == "GET" and "webhook" in path:
            filled_in = path.replace("deliveries/x", f"deliveries/{delivery}").replace("/x", "/we_1")
            response = await api.get(filled_in, headers=reader)
            assert "whsec_" not in response.text, path
            assert response.status_code == (403 if path.endswith("/secret") else 200), path


async def test_keys_are_required_once_the_first_one_exists(
    fake_queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `auto` on the loopback: open until a key exists, and never open again."""
    monkeypatch.setattr(auth, "CACHE_S", 0.0)
    async with serving(fake_queue, tmp_path) as api:
        ignored = {"Authorization": "Bearer sk-any"}
        assert (await api.post("/v1/jobs", json=BODY, headers=ignored)).status_code == 202
        header = await bearer(fake_queue, tenant="default")
        assert code(await api.get("/v1/jobs")) == (401, "missing_api_key")
        assert len((await api.get("/v1/jobs", headers=header)).json()["data"]) == 1
        await fake_queue.api_keys.revoke((await fake_queue.api_keys.all())[0].id)
        assert code(await api.get("/v1/jobs")) == (401, "missing_api_key")


async def test_insecure_no_keys_requires_no_key(fake_queue: Queue, tmp_path: Path) -> None:
    await bearer(fake_queue)
    async with serving(fake_queue, tmp_path, auth="insecure-no-keys") as api:
        assert (await api.get("/v1/jobs")).status_code == 200
        assert (await api.get("/metrics")).status_code == 200


HOSTS = ["evil.example", "localhost.evil.example", "10.0.0.1:8000", "[::]", "evil.example@localhost", "a b"]


async def test_requests_for_other_hosts_are_refused_without_keys(fake_queue: Queue, tmp_path: Path) -> None:
    """DNS rebinding: the browser treats this API as the page's server. The page has no key."""
    paths = (("GET", "/v1/jobs"), ("POST", "/v1/jobs"), ("GET", "/v1/queues"), ("GET", "/metrics"))
    async with serving(fake_queue, tmp_path, public_url="https://images.example") as api:
        for host, (method, path) in product(HOSTS, paths):
            with row(host, method, path):
                response = await api.request(method, path, headers={"Host": host})
                assert code(response) == (403, "host_not_allowed")
        for own in ("localhost:8000", "127.0.0.1", "[::1]:8000", "images.example"):
            assert (await api.get("/v1/jobs", headers={"Host": own})).status_code == 200
    async with serving(fake_queue, tmp_path, auth="keys") as api:
        header = await bearer(fake_queue)
        assert (await api.get("/v1/jobs", headers=header | {"Host": "images.elsewhere"})).status_code == 200


async def test_an_operator_reads_the_jobs_of_a_tenant(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path
) -> None:
    """With the scope admin and the tenant's name; other keys cannot, and without a name it reads its own."""
    operator, own = await bearer(fake_queue, "ops", scopes=ALL), await bearer(fake_queue, "acme")
    other = await bearer(fake_queue, "evil", scopes=ALL - {Scope.ADMIN})
    job_id = (await api.post("/v1/jobs", json={**BODY, "batch_id": "b1"}, headers=own)).json()["id"]
    await finish(fake_queue, tmp_path, job_id)
    for query in ("tenant=acme", "tenant=acme&batch_id=b1", "tenant=acme&status=succeeded"):
        listed = await api.get(f"/v1/jobs?{query}", headers=operator)
        assert [job["id"] for job in listed.json()["data"]] == [job_id]
    job = (await api.get(f"/v1/jobs/{job_id}?tenant=acme", headers=operator)).json()
    assert (await api.get(job["artifacts"][0]["url"])).status_code == 200, "its URL is signed"
    assert (await api.get("/v1/jobs", headers=operator)).json()["data"] == []
    assert code(await api.get(f"/v1/jobs/{job_id}", headers=operator)) == (404, "not_found")
    for path in ("/v1/jobs", f"/v1/jobs/{job_id}"):
        assert code(await api.get(f"{path}?tenant=acme", headers=other))[0] == 403
        assert code(await api.get(f"{path}?tenant=A*", headers=operator))[0] == 422


async def test_another_tenants_objects_are_not_found(api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path) -> None:
    """On every route, with a valid id of another tenant."""
    mine, theirs = await bearer(fake_queue, "acme"), await bearer(fake_queue, "evil")
    once = {"Idempotency-Key": "one"}
    job_id = (await api.post("/v1/jobs", json={**BODY, "batch_id": "b1"}, headers=mine | once)).json()["id"]
    await finish(fake_queue, tmp_path, job_id)
    waiting = (await api.post("/v1/jobs", json=BODY, headers=mine)).json()["id"]
    image = {"file": ("a.png", png(), "image/png")}
    input_id = (await api.post("/v1/inputs", files=image, headers=mine)).json()["id"]

    for one in (job_id, waiting):
        for method, path in (
            ("GET", f"/v1/jobs/{one}"),
            ("GET", f"/v1/jobs/{one}?wait=1"),
            ("GET", f"/v1/jobs/{one}/events"),
            ("GET", f"/v1/jobs/{one}/artifacts/0"),
            ("GET", f"/v1/jobs/{one}/artifacts/0?redirect=true"),
            ("POST", f"/v1/jobs/{one}/cancel"),
            ("DELETE", f"/v1/jobs/{one}"),
        ):
            assert code(await api.request(method, path, headers=theirs)) == (404, "not_found"), path
            unknown = path.replace(one, "job_" + "0" * 26)
            details = [(await api.request(method, url, headers=theirs)).json()["detail"] for url in (path, unknown)]
            assert details[0].replace(one, "ID") == details[1].replace("job_" + "0" * 26, "ID"), "same error"
        assert (await api.head(f"/v1/jobs/{one}/artifacts/0", headers=theirs)).status_code == 404
    for query in ("", "?batch_id=b1", "?status=queued,running,succeeded", "?model=demo", f"?after={job_id}"):
        assert (await api.get(f"/v1/jobs{query}", headers=theirs)).json()["data"] == []
    stolen = await api.post("/v1/jobs", json={**BODY, "image": input_id}, headers=theirs)
    assert code(stolen) == (422, "invalid_input_image")
    assert (await api.get(f"/v1/jobs/{job_id}", headers=mine)).json()["status"] == "succeeded"
    assert (await api.get(f"/v1/jobs/{waiting}", headers=mine)).json()["status"] == "queued"
    assert (await api.get(f"/v1/jobs/{job_id}/artifacts/0", headers=mine)).content == png()


async def test_no_tenant_can_read_a_checkpoint(api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path) -> None:
    """Neither another one, nor that of the job: it is in storage beside the artifacts."""
    mine, theirs = await bearer(fake_queue, "acme"), await bearer(fake_queue, "evil")
    job_id = (await api.post("/v1/jobs", json=BODY, headers=mine)).json()["id"]
    claim, data = await claimed(fake_queue, job_id), b"secret state"
    image = StoredImage(key=checkpoint_key(job_id, 1, 1, 0), bytes=len(data), sha256="", step=1)
    file = tmp_path / "storage" / image.key
    file.parent.mkdir(parents=True)
    file.write_bytes(data)
    assert await fake_queue.claims.keep_checkpoint(WORKER, claim, JobCheckpoint(images=(image,))) == "kept"
    name = image.key.removeprefix(f"jobs/{job_id}/")
    paths = ("0", "0/thumbnail", "checkpoints", name, quote(name, safe=""), f"../{name}", f"%2e%2e%2f{quote(name)}")
    for headers in (mine, theirs):
        for path in paths:
            response = await api.get(f"/v1/jobs/{job_id}/artifacts/{path}", headers=headers)
            assert (response.status_code in (404, 422), data in response.content) == (True, False), path
        for used in (image.key, name, f"http://test/v1/jobs/{job_id}/artifacts/{name}"):
            assert (await api.post("/v1/jobs", json={**BODY, "image": used}, headers=headers)).status_code == 422
    assert (await api.post("/v1/jobs", json={**BODY, "image": job_id}, headers=theirs)).status_code == 422
    assert "checkpoints" not in (await api.get(f"/v1/jobs/{job_id}", headers=mine)).text


async def test_idempotency_keys_and_images_belong_to_one_tenant(api: httpx.AsyncClient, fake_queue: Queue) -> None:
    """Equal keys and images of two tenants are independent."""
    once = {"Idempotency-Key": "one"}
    headers = [await bearer(fake_queue, tenant) | once for tenant in ("acme", "evil")]
    answers = [await api.post("/v1/jobs", json=BODY, headers=header) for header in headers]
    assert [response.headers.get("idempotent-replayed") for response in answers] == [None, None]
    other = await api.post("/v1/jobs", json={**BODY, "seed": 5}, headers=headers[1])
    assert code(other) == (422, "idempotency_key_reused")
    ndjson = {"Content-Type": "application/x-ndjson"}
    lines = [
        await api.post("/v1/jobs:bulk", content=b'{"model":"demo","prompt":"x"}\n', headers=h | ndjson) for h in headers
    ]
    assert [line.json()["replayed"] for line in lines] == [False, False]
    assert lines[0].json()["id"] != lines[1].json()["id"]
    listed = [(await api.get("/v1/jobs", headers=header)).json()["data"] for header in headers]
    assert [len(page) for page in listed] == [2, 2]
    stored = [
        (await api.post("/v1/inputs", files={"file": ("a.png", png(), "image/png")}, headers=header)).json()
        for header in headers
    ]
    for header, one in zip(headers, stored, strict=True):
        body = {**BODY, "image": one["id"]}
        response = await api.post("/v1/jobs", json=body, headers={"Authorization": header["Authorization"]})
        assert response.status_code == 202


async def test_a_signed_url_needs_no_key_and_is_valid_for_one_artifact(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path
) -> None:
    """Browsers and OpenAI's clients fetch it without a header."""
    mine = await bearer(fake_queue)
    ids = []
    for _ in range(2):
        ids.append((await api.post("/v1/jobs", json=BODY, headers=mine)).json()["id"])
        await finish(fake_queue, tmp_path, ids[-1])
    responses = [(await api.get(f"/v1/jobs/{job_id}", headers=mine)) for job_id in ids]
    urls = [response.json()["artifacts"][0]["url"] for response in responses]
    assert (await api.get(urls[0])).content == png()
    assert (await api.get(urls[0], headers={"Range": "bytes=0-3"})).status_code == 206
    assert (await api.head(urls[0])).status_code == 200
    url = httpx.URL(urls[0])
    changed = [
        str(url).replace(ids[0], ids[1]),
        str(url).replace("/artifacts/0", "/artifacts/1"),
        str(url.copy_set_param("expires", int(url.params["expires"]) + 1)),
        str(url.copy_set_param("expires", 10**20)),
        str(url.copy_set_param("signature", "0" * 64)),
        str(url.copy_set_param("signature", "")),
        str(url.copy_remove_param("expires")),
    ]
    for other in changed:
        assert code(await api.get(other)) == (403, "invalid_signature"), other
    assert code(await api.get(str(url.copy_remove_param("signature")))) == (401, "missing_api_key")
    assert code(await api.get(urls[0].replace("/artifacts/0", ""))) == (401, "missing_api_key")
    again = await api.get(f"/v1/jobs/{ids[0]}", headers=mine | {"If-None-Match": responses[0].headers["etag"]})
    assert again.status_code == 304, "the response of a job does not change with every poll"
    assert (await api.delete(f"/v1/jobs/{ids[0]}", headers=mine)).status_code == 204
    assert code(await api.get(urls[0])) == (404, "not_found")


async def test_events_are_read_by_their_signed_url_until_it_expires(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A browser's EventSource sends no headers."""
    mine = await bearer(fake_queue)
    done, other_job = [(await api.post("/v1/jobs", json=BODY, headers=mine)).json() for _ in range(2)]
    await finish(fake_queue, tmp_path, done["id"])
    url = httpx.URL(done["urls"]["events"])
    response = await api.get(url)
    assert response.status_code == 200
    artifact = json.loads(response.text.partition("data: ")[2])["artifacts"][0]["url"]
    assert (await api.get(artifact)).content == png()
    swapped = httpx.URL(artifact).copy_with(path=url.path)
    for other in (str(url).replace(done["id"], other_job["id"]), str(swapped), str(url) + "0"):
        assert code(await api.get(other)) == (403, "invalid_signature"), other
    assert code(await api.get(str(url).partition("?")[0])) == (401, "missing_api_key")
    assert code(await api.get(str(url).replace("/events", ""))) == (401, "missing_api_key")
    write_only = await bearer(fake_queue, scopes=frozenset((Scope.JOBS_WRITE,)))
    assert code(await api.get(url.path, headers=write_only)) == (403, "permission_denied")
    open_until = other_job["urls"]["events"].removeprefix("http://localhost")
    reader = StreamingCall(api, open_until)
    await reader.wait_for("event: state")
    for module in (context, events):
        monkeypatch.setattr(module, "now_ms", lambda: 1000 * int(url.params["expires"]))
    await reader.read_all()  # it ends when the URL expires
    assert code(await api.get(open_until)) == (403, "invalid_signature")


async def test_a_tenant_over_its_rate_limit_gets_retry_after(api: httpx.AsyncClient, fake_queue: Queue) -> None:
    await fake_queue.api_keys.set_limits("acme", TenantLimits(requests_per_minute=3))
    mine, second = await bearer(fake_queue), await bearer(fake_queue)
    responses = [await api.get("/v1/models", headers=header) for header in (mine, second, mine)]
    assert [response.status_code for response in responses] == [200] * 3
    assert [response.headers["x-ratelimit-remaining-requests"] for response in responses] == ["2", "1", "0"]
    assert responses[0].headers["ratelimit-policy"] == '"requests";q=3;w=60'
    assert re.fullmatch(r'"requests";r=2;t=(19|20)', responses[0].headers["ratelimit"])
    assert responses[0].headers["x-ratelimit-limit-requests"] == "3"
    assert re.fullmatch(r"\d+(ms|s)", responses[0].headers["x-ratelimit-reset-requests"])
    refused = await api.get("/v1/models", headers=second)
    assert code(refused) == (429, "rate_limit_exceeded")
    assert refused.json()["error"]["type"] == "rate_limit_error"
    again_ms = int(refused.headers["retry-after-ms"])
    assert 0 < again_ms <= 20_000
    assert int(refused.headers["retry-after"]) == -(-again_ms // 1000)
    assert refused.headers["ratelimit"].startswith('"requests";r=0;')
    other = await api.get("/v1/models", headers=await bearer(fake_queue, "other"))
    assert other.status_code == 200
    assert "ratelimit" not in other.headers, "no limit, no word of one"
    assert (await api.get("/healthz")).status_code == 200


async def test_the_rate_limit_counts_each_tenant_separately(fake_queue: Queue, tmp_path: Path) -> None:
    async with serving(fake_queue, tmp_path, max_requests_per_minute_per_tenant=1) as api:
        assert [(await api.get("/v1/models")).status_code for _ in range(2)] == [200, 429]


async def test_queued_jobs_of_one_tenant_do_not_block_another(fake_queue: Queue, api: httpx.AsyncClient) -> None:
    await fake_queue.api_keys.set_limits("acme", TenantLimits(queued_jobs=1))
    mine, theirs = await bearer(fake_queue), await bearer(fake_queue, "other")
    assert (await api.post("/v1/jobs", json=BODY, headers=mine)).status_code == 202
    full = await api.post("/v1/jobs", json=BODY, headers=mine)
    assert code(full) == (429, "queue_full")
    assert int(full.headers["retry-after"]) >= 1
    assert (await api.post("/v1/jobs", json=BODY, headers=theirs)).status_code == 202


async def test_only_listed_origins_can_call(fake_queue: Queue, tmp_path: Path) -> None:
    asks = {"Origin": "https://shop.example", "Access-Control-Request-Method": "POST"}
    async with serving(fake_queue, tmp_path) as api:
        assert "access-control-allow-origin" not in (await api.options("/v1/jobs", headers=asks)).headers
        assert "access-control-allow-origin" not in (await api.get("/v1/jobs", headers=asks)).headers
    async with serving(fake_queue, tmp_path, cors_origins=("https://shop.example",)) as api:
        allowed = await api.options("/v1/jobs", headers=asks | {"Access-Control-Request-Headers": "authorization"})
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://shop.example"
        response = await api.get("/v1/jobs/none", headers=asks)
        exposed = response.headers["access-control-expose-headers"].split(", ")
        assert {"x-request-id", "x-job-id", "x-seed", "x-warning"} <= set(exposed)
        assert "access-control-allow-credentials" not in response.headers
        other = await api.get("/v1/jobs", headers={"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers


async def test_the_documentation_names_the_paths_that_require_a_key(api: httpx.AsyncClient) -> None:
    page = (await api.get("/openapi.json")).json()
    assert page["components"]["securitySchemes"]["ApiKey"]["scheme"] == "bearer"
    submit, alive = page["paths"]["/v1/jobs"]["post"], page["paths"]["/healthz"]["get"]
    assert (submit["security"], alive["security"]) == ([{"ApiKey": []}], [])
    assert {"401", "403", "429"} <= set(submit["responses"])
