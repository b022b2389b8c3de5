"""Finished pictures over HTTP: whole, in parts, from elsewhere."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from harness.http_server import BODY, WORKER, claimed, finish, png, serving

from shared.job import Artifact, Outcome, State, Thumbnail
from shared.queue import Queue
from shared.storage.folder import FolderStorage


@pytest.fixture
async def api(fake_queue: Queue, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(fake_queue, tmp_path) as client:
        yield client


@pytest.fixture
async def url(api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path) -> str:
    job_id = (await api.post("/v1/jobs", json=BODY)).json()["id"]
    await finish(fake_queue, tmp_path, job_id)
    return f"/v1/jobs/{job_id}/artifacts/0"


async def test_a_picture_comes_as_it_was_stored(api: httpx.AsyncClient, url: str) -> None:
    answer = await api.get(url)
    job_id = url.split("/")[3]
    assert answer.status_code == 200
    assert answer.content == png()
    assert answer.headers["content-type"] == "image/png"
    assert answer.headers["content-length"] == str(len(png()))
    assert answer.headers["content-disposition"] == f'inline; filename="{job_id}-0.png"'
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["accept-ranges"] == "bytes"


async def test_a_part_of_a_picture_can_be_asked_for(api: httpx.AsyncClient, url: str) -> None:
    whole = png()
    answer = await api.get(url, headers={"Range": "bytes=10-19"})
    assert (answer.status_code, answer.content) == (206, whole[10:20])
    assert answer.headers["content-range"] == f"bytes 10-19/{len(whole)}"
    last = await api.get(url, headers={"Range": "bytes=-7"})
    assert last.content == whole[-7:]


async def test_a_range_beyond_the_picture_tells_its_size(api: httpx.AsyncClient, url: str) -> None:
    answer = await api.get(url, headers={"Range": "bytes=100000-"})
    assert (answer.status_code, answer.json()["code"]) == (416, "range_not_satisfiable")
    assert answer.headers["content-range"] == f"bytes */{len(png())}"


async def test_a_range_of_another_version_gets_the_whole(api: httpx.AsyncClient, url: str) -> None:
    etag = (await api.get(url)).headers["etag"]
    same = await api.get(url, headers={"Range": "bytes=0-3", "If-Range": etag})
    other = await api.get(url, headers={"Range": "bytes=0-3", "If-Range": '"other"'})
    assert (same.status_code, other.status_code) == (206, 200)


@pytest.mark.parametrize("has", ["{}", "W/{}", '"other", {}', "*"])
async def test_a_picture_that_the_client_has_is_not_sent_again(api: httpx.AsyncClient, url: str, has: str) -> None:
    etag = (await api.get(url)).headers["etag"]
    answer = await api.get(url, headers={"If-None-Match": has.format(etag)})
    assert (answer.status_code, answer.content) == (304, b"")


async def test_a_head_tells_all_but_the_bytes(api: httpx.AsyncClient, url: str) -> None:
    answer = await api.head(url)
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-length"] == str(len(png()))


async def test_a_picture_there_is_not_says_what_there_is(api: httpx.AsyncClient, url: str) -> None:
    answer = await api.get(url.removesuffix("0") + "1")
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "index")
    assert "has 1 artifacts" in answer.json()["detail"]
    assert (await api.get(url.removesuffix("0") + "-1")).status_code == 404


async def test_a_picture_whose_file_is_gone_is_not_found(api: httpx.AsyncClient, url: str, tmp_path: Path) -> None:
    for file in (tmp_path / "storage").rglob("*.png"):
        file.unlink()
    assert (await api.get(url)).status_code == 404


async def test_a_redirect_leads_to_the_storage_where_it_can_sign(
    api: httpx.AsyncClient, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await api.get(url, params={"redirect": "true"})).status_code == 200, "a folder cannot sign"

    async def signed(self: FolderStorage, key: str, expires_s: int) -> str:
        return f"https://storage.example/{key}?signature=x&expires={expires_s}"

    monkeypatch.setattr(FolderStorage, "presigned_url", signed)
    answer = await api.get(url, params={"redirect": "true"})
    assert answer.status_code == 307
    assert answer.headers["location"].startswith("https://storage.example/jobs/")
    assert (await api.get(url)).status_code == 200, "nobody asked"


async def test_a_video_is_played_from_any_place_and_has_a_still(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path
) -> None:
    """Players ask for parts of it; lists show its thumbnail."""
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

    (told,) = (await api.get(f"/v1/jobs/{job_id}")).json()["artifacts"]
    assert (told["kind"], told["frames"], told["fps"], told["duration_s"]) == ("video", 9, 8, 1.125)
    assert (told["has_audio"], "thumbnail" in told, "key" in told) == (False, False, False)
    part = await api.get(told["url"], headers={"Range": "bytes=1000-"})
    assert (part.status_code, part.content, part.headers["content-type"]) == (206, video[1000:], "video/mp4")
    shown = await api.get(told["thumbnail_url"])
    assert (shown.status_code, shown.content, shown.headers["content-type"]) == (200, still, "image/jpeg")
    assert shown.headers["content-disposition"] == f'inline; filename="{job_id}-0-thumbnail.jpg"'
    assert shown.headers["etag"] != part.headers["etag"]
    assert (await api.head(told["thumbnail_url"])).headers["content-length"] == str(len(still))
    await storage.delete_prefix(f"jobs/{job_id}/")
    assert [(await api.get(told[url])).status_code for url in ("url", "thumbnail_url")] == [404, 404]


async def test_a_picture_has_no_thumbnail(api: httpx.AsyncClient, url: str) -> None:
    """The error says why."""
    answer = await api.get(f"{url}/thumbnail")
    assert (answer.status_code, answer.json()["code"]) == (404, "not_found")
    assert "no video" in answer.json()["detail"]
