"""The files of a group in one archive."""

from __future__ import annotations

import io
import json
import zipfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.http_server import BODY, bearer, claimed, finish, png, serving

from api.http.zip_stream import ZipFile, zip_archive
from api.jobs import manifest
from api.routes import group_archives
from api.routes.group_archives import MANIFEST
from cli.backfill import pipeline
from shared.auth import Scope
from shared.job import State
from shared.job_record import Artifact, Outcome
from shared.queue import Queue

PATH = "/v1/groups/nightly/artifacts.zip"


async def submit(api: httpx.AsyncClient, **fields: Any) -> str:
    return str((await api.post("/v1/jobs", json={**BODY, "group": "nightly", **fields})).json()["id"])


def files(response: httpx.Response) -> dict[str, bytes]:
    assert response.status_code == 200, response.text
    archive = zipfile.ZipFile(io.BytesIO(response.content))
    assert archive.testzip() is None
    return {name: archive.read(name) for name in archive.namelist()}


async def test_the_archive_has_the_files_of_jobs_that_have_succeeded_oldest_first(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path
) -> None:
    """Not those of other groups, of unfinished or failed jobs, nor files that were sent elsewhere."""
    images = {}
    for prompt in ("a Red fox!", "東京"):
        job_id = await submit(api, prompt=prompt)
        words = "-a-red-fox" if prompt == "a Red fox!" else ""
        images[f"{job_id}{words}-0.png"] = await finish(fake_queue, tmp_path, job_id)
    await finish(fake_queue, tmp_path, await submit(api, group="other"))
    sent = await claimed(fake_queue, await submit(api))
    about: dict[str, Any] = {"width": 64, "height": 64, "seed": 1, "location": "https://host/0.png"}
    artifact = Artifact(index=0, key=f"jobs/{sent.job.id}/1/0.png", content_type="image/png", bytes=1, **about)
    outcome = Outcome(state=State.SUCCEEDED, artifacts=(artifact,))
    assert await fake_queue.claims.settle("worker-of-the-test", sent.job.id, sent.epoch, outcome)
    await submit(api)
    response = await api.get(PATH)
    found = files(response)
    rows = [json.loads(line) for line in found.pop(MANIFEST).splitlines()]
    assert list(found.items()) == list(images.items())
    assert [row["files"] for row in rows] == [[name] for name in images]
    assert response.headers["content-disposition"] == 'attachment; filename="nightly.zip"'


async def test_a_file_that_is_deleted_meanwhile_is_left_out(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path
) -> None:
    gone, kept = await submit(api), ""
    await finish(fake_queue, tmp_path, gone)
    kept = await submit(api)
    await finish(fake_queue, tmp_path, kept)
    for file in (tmp_path / "storage").rglob(f"*{gone}*/*/*.png"):
        file.unlink()
    name, last = files(await api.get(PATH)).items()
    assert name[0].startswith(kept)
    assert [json.loads(line)["job"] for line in last[1].splitlines()] == [kept]


async def test_a_row_of_the_manifest_says_how_to_make_the_same_again(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path
) -> None:
    """With the fields that a manifest of a backfill has, and the seed and size that the service has chosen."""
    fields = {"prompt": "東京", "negative_prompt": "rain", "strength": 0.5, "metadata": {"order": "7"}, "n": 2}
    upload = await api.post("/v1/inputs", files={"file": png()})
    job_id = await submit(api, **fields, image=upload.json()["id"])
    await finish(fake_queue, tmp_path, job_id)
    found = files(await api.get(PATH))
    (row,) = [json.loads(line) for line in found.pop(MANIFEST).splitlines()]
    made, job = row.pop("made"), (await api.get(f"/v1/jobs/{job_id}")).json()
    request = {name: row.pop(name) for name in (*fields.keys() - {"strength"}, "image", "task", "group")}
    assert row == {"state": "done", "job": job_id, "files": list(found), "flagged": [], "error": None}
    assert made.pop("device_seconds") == job["metrics"]["device_seconds"]
    again = await api.post("/v1/jobs", json={**request, **made})
    assert again.status_code == 202, (again.text, made)
    chosen = (*request, *made)
    assert {name: again.json()[name] for name in chosen} == {name: job[name] for name in chosen}


def test_manifests_of_archives_and_of_backfills_have_the_same_fields() -> None:
    assert manifest.MADE_WITH == pipeline.MADE_WITH


async def test_there_is_no_archive_without_files_and_none_of_too_many(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = await submit(api)
    response = await api.get(PATH)
    assert (response.status_code, response.json()["error"]["message"]) == (404, "no job of group nightly has succeeded")
    await finish(fake_queue, tmp_path, job_id)
    monkeypatch.setattr(group_archives, "MAX_JOBS", 0)
    response = await api.get(PATH)
    assert (response.status_code, response.json()["error"]["param"]) == (422, "group")
    assert "fusequeue groups download nightly" in response.json()["error"]["message"]


async def test_a_tenant_reads_its_own_archive_only(fake_queue: Queue, tmp_path: Path) -> None:
    mine, other = await bearer(fake_queue, "acme"), await bearer(fake_queue, "other", [Scope.JOBS_READ])
    async with serving(fake_queue, tmp_path, auth="keys") as api:
        body = {**BODY, "group": "nightly"}
        job_id = (await api.post("/v1/jobs", json=body, headers=mine)).json()["id"]
        await finish(fake_queue, tmp_path, job_id)
        assert len(files(await api.get(PATH, headers=mine))) == 2
        assert (await api.get(PATH, headers=other)).status_code == 404
        assert (await api.get(f"{PATH}?tenant=acme", headers=other)).status_code == 403


async def test_an_archive_is_sent_in_pieces() -> None:
    """The largest piece is one of a file, and what stands between two files."""

    async def pieces() -> Any:
        for _ in range(100):
            yield b"x" * 1000

    async def entries() -> Any:
        for name in ("a.png", "b.png"):
            yield ZipFile(name, 100_000, datetime(2026, 1, 31, 12, tzinfo=UTC), pieces())

    sent = [piece async for piece in zip_archive(entries())]
    assert max(map(len, sent)) < 1300
    archive = zipfile.ZipFile(io.BytesIO(b"".join(sent)))
    assert [(info.filename, info.file_size) for info in archive.infolist()] == [("a.png", 100_000), ("b.png", 100_000)]
    assert archive.testzip() is None
