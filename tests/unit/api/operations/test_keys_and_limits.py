"""API keys and limits of tenants over HTTP, for operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.http_server import BODY, bearer, serving
from harness.tables import row

from api import auth
from shared.auth import Scope
from shared.queue import Queue

READ = frozenset((Scope.JOBS_READ,))


async def logged(api: httpx.AsyncClient, **headers: str) -> list[tuple[str, str, str]]:
    page = (await api.get("/v1/actions", headers=headers)).json()
    return [(entry["action"], entry["target"], entry["detail"]) for entry in page["data"]]


async def test_keys_are_listed_page_by_page_without_their_secrets(fake_queue: Queue, tmp_path: Path) -> None:
    tokens = [(await fake_queue.api_keys.create(f"t{n % 2}", READ, name=f"note {n}", lives_s=60))[0] for n in range(5)]
    async with serving(fake_queue, tmp_path, auth="insecure-no-keys") as api:
        first = (await api.get("/v1/keys", params={"limit": 3})).json()
        second = (await api.get("/v1/keys", params={"limit": 3, "after": first["next_cursor"]})).json()
        of_one = (await api.get("/v1/keys", params={"tenant": "t1"})).json()["data"]
    listed = first["data"] + second["data"]
    assert sorted(key["id"] for key in listed) == sorted(token[3:13] for token in tokens)
    assert [key["created_at"] for key in listed] == sorted((key["created_at"] for key in listed), reverse=True)
    assert (first["has_more"], second["has_more"], second["next_cursor"]) == (True, False, None)
    newest = next(key for key in listed if key["name"] == "note 4")
    assert (newest["tenant"], newest["scopes"]) == ("t0", ["jobs:read"])
    assert (newest["state"], newest["prefix"], newest["last_used_at"]) == ("active", tokens[4][:13], None)
    assert newest["created_at"] < newest["expires_at"]
    assert not any(token[13:] in str(listed) for token in tokens)
    assert {key["name"] for key in of_one} == {"note 3", "note 1"}


async def test_a_revoked_key_is_refused_and_says_so(
    fake_queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "CACHE_S", 0.0)
    async with serving(fake_queue, tmp_path, auth="keys") as api:
        admin = await bearer(fake_queue, "ops", (Scope.ADMIN,))
        token, key = await fake_queue.api_keys.create("acme", READ)
        reader = {"Authorization": f"Bearer {token}"}
        assert (await api.get("/v1/jobs", headers=reader)).status_code == 200
        assert (await api.delete(f"/v1/keys/{key.prefix}", headers=admin)).status_code == 204
        refused = await api.get("/v1/jobs", headers=reader)
        assert (refused.status_code, "revoked" in refused.text) == (401, True)
        (listed,) = (await api.get("/v1/keys", params={"tenant": "acme"}, headers=admin)).json()["data"]
        assert (listed["state"], listed["revoked_at"] is None) == ("revoked", False)
        assert await logged(api, **admin) == [("revoke_key", f"key {key.id}", "")]


NEW = {"tenant": "acme", "scopes": ["jobs:read", "jobs:write"], "name": "laptop", "expires_s": 3600}
CREATOR = (Scope.ADMIN, Scope.KEYS_CREATE)


async def test_a_created_key_is_shown_once_and_works(fake_queue: Queue, tmp_path: Path) -> None:
    async with serving(fake_queue, tmp_path, auth="keys") as api:
        creator = await bearer(fake_queue, "ops", CREATOR)
        created = await api.post("/v1/keys", json=NEW, headers=creator)
        assert (created.status_code, created.headers["cache-control"]) == (201, "no-store")
        token = created.json()["key"]
        own = {"Authorization": f"Bearer {token}"}
        assert (await api.post("/v1/jobs", json=BODY, headers=own)).status_code == 202
        assert (await api.get("/v1/keys", headers=own)).status_code == 403
        (listed,) = (await api.get("/v1/keys", params={"tenant": "acme"}, headers=creator)).json()["data"]
        assert {**listed, "key": token, "last_used_at": None} == created.json()
        assert (listed["name"], listed["scopes"], token[13:] in str(listed)) == ("laptop", NEW["scopes"], False)
        assert await logged(api, **creator) == [
            ("create_key", f"key {listed['id']}", "tenant acme: jobs:read, jobs:write")
        ]


async def test_only_a_key_that_may_create_keys_does_and_none_that_may_so_itself(
    fake_queue: Queue, tmp_path: Path
) -> None:
    """A leaked key of the scope `admin` creates none, and one that creates keys creates none that outrank tenants'."""
    async with serving(fake_queue, tmp_path, auth="keys") as api:
        for scopes in ((Scope.ADMIN,), (Scope.KEYS_CREATE,), (Scope.ADMIN, Scope.JOBS_READ, Scope.JOBS_WRITE)):
            refused = await api.post("/v1/keys", json=NEW, headers=await bearer(fake_queue, "ops", scopes))
            assert refused.status_code == 403, scopes
        creator = await bearer(fake_queue, "ops", CREATOR)
        for change, param in (
            ({"scopes": ["admin"]}, "scopes.0"),
            ({"scopes": ["jobs:read", "keys:create"]}, "scopes.1"),
            ({"scopes": []}, "scopes"),
            ({"tenant": "A b"}, "tenant"),
            ({"name": "x" * 101}, "name"),
            ({"name": "a\x00b"}, "name"),
            ({"expires_s": 0}, "expires_s"),
            ({"expires": 60}, "expires"),
        ):
            with row(change):
                response = await api.post("/v1/keys", json={**NEW, **change}, headers=creator)
                assert (response.status_code, response.json()["error"]["param"]) == (422, param)
        assert (await api.get("/v1/keys", params={"tenant": "acme"}, headers=creator)).json()["data"] == []


async def test_without_keys_none_is_created_over_http(api: httpx.AsyncClient, fake_queue: Queue) -> None:
    refused = await api.post("/v1/keys", json=NEW)
    assert (refused.status_code, "fusequeue keys create" in refused.text) == (403, True)
    assert await fake_queue.api_keys.any_created() is False


async def test_limits_are_changed_one_by_one_and_restored(api: httpx.AsyncClient, fake_queue: Queue) -> None:
    path = "/v1/tenants/default/limits"
    changed = (await api.patch(path, json={"queued_jobs": 1, "kept_jobs": 10**15})).json()
    assert (changed["limits"]["queued_jobs"], changed["own_limits"]) == (1, ["kept_jobs", "queued_jobs"])
    assert (await api.post("/v1/jobs", json=BODY)).status_code == 202
    assert (await api.post("/v1/jobs", json=BODY)).json()["code"] == "queue_full"
    restored = (await api.patch(path, json={"queued_jobs": None})).json()
    assert (restored["limits"]["queued_jobs"], restored["own_limits"]) == (50_000, ["kept_jobs"])
    assert (await api.post("/v1/jobs", json=BODY)).status_code == 202
    (tenant,) = (await api.get("/v1/tenants")).json()["data"]
    assert (tenant["limits"], tenant["own_limits"]) == (restored["limits"], ["kept_jobs"])
    assert await logged(api) == [
        ("limit", "tenant default", "queued_jobs default"),
        ("limit", "tenant default", f"queued_jobs 1, kept_jobs {10**15}"),
    ]


async def test_bad_changes_name_what_is_wrong_and_change_nothing(api: httpx.AsyncClient) -> None:
    limits = "/v1/tenants/acme/limits"
    cases: tuple[tuple[str, str, Any, int, str], ...] = (
        ("PATCH", limits, {"queued_jobs": 0}, 422, "queued_jobs"),
        ("PATCH", limits, {"running_slots": 3, "kept_jobs": 10**15 + 1}, 422, "kept_jobs"),
        ("PATCH", limits, {"running_slots": "3"}, 422, "running_slots"),
        ("PATCH", limits, {"slots": 3}, 422, "slots"),
        ("PATCH", limits, {}, 422, "requests_per_minute"),
        ("PATCH", "/v1/tenants/A%20b/limits", {"running_slots": 3}, 422, "tenant"),
        ("DELETE", "/v1/keys/nothing", None, 404, "key_id"),
        ("GET", "/v1/keys?after=nothing", None, 422, "after"),
        ("GET", "/v1/keys?tenants=acme", None, 422, "tenants"),
    )
    for method, path, body, status, param in cases:
        with row(method, path, body):
            response = await api.request(method, path, **({} if body is None else {"json": body}))
            assert (response.status_code, response.json()["error"]["param"]) == (status, param)
    assert (await api.get("/v1/tenants")).json()["data"] == []
    assert await logged(api) == []


async def test_only_operators_see_keys_and_change_limits(fake_queue: Queue, tmp_path: Path) -> None:
    async with serving(fake_queue, tmp_path, auth="keys") as api:
        headers = await bearer(fake_queue, "acme", (Scope.JOBS_READ, Scope.JOBS_WRITE, Scope.METRICS))
        for method, path in (
            ("GET", "/v1/keys"),
            ("DELETE", "/v1/keys/nothing"),
            ("PATCH", "/v1/tenants/acme/limits"),
        ):
            assert (await api.request(method, path, headers=headers)).status_code == 403, (method, path)
