"""Artifacts over HTTP: data, ranges, redirects, thumbnails."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from harness.http_server import BODY, WORKER, claimed, finish, png
from harness.tables import row

from shared.job import State
from shared.job_record import Artifact, Outcome, Thumbnail
from shared.queue import Queue
from shared.storage.folder import FolderStorage


@pytest.fixture
async def url(api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path) -> str:
    job_id = (await api.post("/v1/jobs", json=BODY)).json()["id"]
    await finish(fake_queue, tmp_path, job_id)
    return f"/v1/jobs/{job_id}/artifacts/0"


async def test_an_artifact_is_returned_as_stored(api: httpx.AsyncClient, url: str) -> None:
    response = await api.get(url)
    job_id = url.split("/")[3]
    assert response.status_code == 200
    assert response.content == png()
    assert response.headers["content-type"] == "image/png"
    assert response.headers["content-length"] == str(len(png()))
    assert response.headers["content-disposition"] == f'inline; filename="{job_id}-0.png"'
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["accept-ranges"] == "bytes"


async def test_a_range_returns_a_part_of_the_artifact(api: httpx.AsyncClient, url: str) -> None:
    data = png()
    response = await api.get(url, headers={"Range": "bytes=10-19"})
    assert (response.status_code, response.content) == (206, data[10:20])
    assert response.headers["content-range"] == f"bytes 10-19/{len(data)}"
    last = await api.get(url, headers={"Range": "bytes=-7"})
    assert last.content == data[-7:]


async def test_a_range_beyond_the_artifact_is_refused_with_its_size(api: httpx.AsyncClient, url: str) -> None:
    response = await api.get(url, headers={"Range": "bytes=100000-"})
    assert (response.status_code, response.json()["code"]) == (416, "range_not_satisfiable")
    assert response.headers["content-range"] == f"bytes */{len(png())}"


async def test_a_range_of_another_version_returns_the_whole_artifact(api: httpx.AsyncClient, url: str) -> None:
    etag = (await api.get(url)).headers["etag"]
    same = await api.get(url, headers={"Range": "bytes=0-3", "If-Range": etag})
    other = await api.get(url, headers={"Range": "bytes=0-3", "If-Range": '"other"'})
    assert (same.status_code, other.status_code) == (206, 200)


ETAGS = ["{}", "W/{}", '"other", {}', "*"]


async def test_an_artifact_that_the_client_has_is_not_sent_again(api: httpx.AsyncClient, url: str) -> None:
    for has in ETAGS:
        with row(has):
            etag = (await api.get(url)).headers["etag"]
            response = await api.get(url, headers={"If-None-Match": has.format(etag)})
            assert (response.status_code, response.content) == (304, b"")


async def test_head_returns_the_headers_without_the_bytes(api: httpx.AsyncClient, url: str) -> None:
    for headers in ({}, {"Range": "bytes=0-3"}):  # a range counts for GET only
        response = await api.head(url, headers=headers)
        assert (response.status_code, response.content) == (200, b"")
        assert response.headers["content-length"] == str(len(png()))


async def test_a_missing_artifact_error_has_the_number_of_artifacts(api: httpx.AsyncClient, url: str) -> None:
    response = await api.get(url.removesuffix("0") + "1")
    assert (response.status_code, response.json()["error"]["param"]) == (404, "index")
    assert "has 1 artifacts" in response.json()["detail"]
    assert (await api.get(url.removesuffix("0") + "-1")).status_code == 404


async def test_an_artifact_without_its_file_is_not_found(api: httpx.AsyncClient, url: str, tmp_path: Path) -> None:
    for file in (tmp_path / "storage").rglob("*.png"):
        file.unlink()
    assert (await api.get(url)).status_code == 404


async def test_a_redirect_leads_to_a_storage_that_can_sign(
    api: httpx.AsyncClient, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await api.get(url, params={"redirect": "true"})).status_code == 200, "a folder cannot sign"

    async def signed(self: FolderStorage, key: str, expires_s: int) -> str:
        return f"https://storage.example/{key}?signature=x&expires={expires_s}"

    monkeypatch.setattr(FolderStorage, "presigned_url", signed)
    response = await api.get(url, params={"redirect": "true"})
    assert response.status_code == 307
    assert response.headers["location"].startswith("https://storage.example/jobs/")
    assert (await api.get(url)).status_code == 200, "no redirect without the parameter"
    head = await api.head(url, params={"redirect": "true"})
    assert head.status_code == 200, "a URL that is signed for GET refuses HEAD"


async def test_a_video_supports_ranges_and_has_a_thumbnail(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path
) -> None:
    """Players request parts of it; lists show its thumbnail."""
    job_id = (await api.post("/v1/jobs", json=BODY)).json()["id"]
    claim = await claimed(fake_queue, job_id)
    storage = FolderStorage(tmp_path / "storage", timeout_s=10)
    video, still = bytes(range(256)) * 2048, png()  # one of several pieces, one of one
    await storage.put(f"jobs/{job_id}/1/0.mp4", video, "video/mp4")
    await storage.put(f"jobs/{job_id}/1/0-thumbnail.jpg", still, "image/jpeg")
    thumbnail = Thumbnail(
        key=f"jobs/{job_id}/1/0-thumbnail.jpg", content_type="image/jpeg", bytes=len(still), width=64, height=64
    )
    artifact = Artifact(
        index=0, kind="video", key=f"jobs/{job_id}/1/0.mp4", content_type="video/mp4", bytes=len(video), width=64,
        height=64, seed=7, frames=9, fps=8, duration_s=1.125, has_audio=False, thumbnail=thumbnail,
    )  # fmt: skip
    outcome = Outcome(state=State.SUCCEEDED, artifacts=(artifact,))
    assert await fake_queue.claims.settle(WORKER, job_id, claim.epoch, outcome)

    (shown,) = (await api.get(f"/v1/jobs/{job_id}")).json()["artifacts"]
    assert (shown["kind"], shown["frames"], shown["fps"], shown["duration_s"]) == ("video", 9, 8, 1.125)
    assert (shown["has_audio"], "thumbnail" in shown, "key" in shown) == (False, False, False)
    part = await api.get(shown["url"], headers={"Range": "bytes=1000-"})
    assert (part.status_code, part.content, part.headers["content-type"]) == (206, video[1000:], "video/mp4")
    thumbnail = await api.get(shown["thumbnail_url"])
    assert (thumbnail.status_code, thumbnail.content, thumbnail.headers["content-type"]) == (200, still, "image/jpeg")
    assert thumbnail.headers["content-disposition"] == f'inline; filename="{job_id}-0-thumbnail.jpg"'
    assert thumbnail.headers["etag"] != part.headers["etag"]
    assert (await api.head(shown["thumbnail_url"])).headers["content-length"] == str(len(still))
    await storage.delete_prefix(f"jobs/{job_id}/")
    assert [(await api.get(shown[url])).status_code for url in ("url", "thumbnail_url")] == [404, 404]


async def test_an_image_has_no_thumbnail(api: httpx.AsyncClient, url: str) -> None:
    """The error names the reason."""
    response = await api.get(f"{url}/thumbnail")
    assert (response.status_code, response.json()["code"]) == (404, "not_found")
    assert "is no video, sound or mesh" in response.json()["detail"]
