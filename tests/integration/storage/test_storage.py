"""The storage contract, on a folder and, over HTTP, on an S3 server."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.auth import keys_marked, mark_keys
from shared.config.settings import Settings
from shared.errors import NotFound, StorageUnavailable
from shared.storage import Storage, connect

CREDENTIALS = {"s3_access_key_id": "test", "s3_secret_access_key": "test"}


def _s3(url: str, **changes: Any) -> Settings:
    return Settings(**({"s3_bucket": "images", "s3_endpoint_url": url, **CREDENTIALS} | changes))


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.every_s3)])
async def storage(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Storage]:
    if request.param == "folder":
        opened = connect(Settings(storage_dir=tmp_path / "objects"))
    else:
        url = request.getfixturevalue("s3_server")
        opened = connect(_s3(url, s3_prefix=tmp_path.name))
    yield opened
    await opened.close()


async def test_object_reads_back_with_its_size_and_type(storage: Storage) -> None:
    await storage.put("jobs/job_1/1/0.png", b"image", "image/png")
    info = await storage.head("jobs/job_1/1/0.png")
    assert (info.size, info.content_type) == (5, "image/png")
    assert info.etag
    assert await storage.read("jobs/job_1/1/0.png") == b"image"


async def test_that_a_namespace_has_had_a_key_is_recorded(storage: Storage) -> None:
    assert not await keys_marked(storage, "one")
    await mark_keys(storage, "one")
    await mark_keys(storage, "one")
    assert await keys_marked(storage, "one")
    assert not await keys_marked(storage, "other")


@pytest.mark.parametrize(("key", "content_type"), [("inputs/default/in_1", "image/webp"), ("a/b.png", "text/x-odd")])
async def test_content_type_is_kept_when_the_extension_differs(storage: Storage, key: str, content_type: str) -> None:
    await storage.put(key, b"x", content_type)
    assert (await storage.head(key)).content_type == content_type


async def test_second_put_replaces_content_type_and_etag(storage: Storage) -> None:
    await storage.put("a/b", b"one", "image/webp")
    before = await storage.head("a/b")
    await storage.put("a/b", b"two", "application/octet-stream")
    after = await storage.head("a/b")
    assert await storage.read("a/b") == b"two"
    assert (after.content_type, after.etag != before.etag) == ("application/octet-stream", True)


async def test_ranges_are_half_open_and_end_with_the_object(storage: Storage) -> None:
    """`read` and `stream` agree on [start, end), also beyond the object."""
    await storage.put("a/digits", b"0123456789", "application/octet-stream")
    for start, end, expected in (
        (0, None, b"0123456789"),
        (3, None, b"3456789"),
        (0, 4, b"0123"),
        (3, 7, b"3456"),
        (8, 99, b"89"),
        (4, 4, b""),
        (10, None, b""),
        (99, 120, b""),
    ):
        assert await storage.read("a/digits", start, end) == expected
        assert b"".join([piece async for piece in storage.stream("a/digits", start, end)]) == expected
    with pytest.raises(ValueError, match="invalid range"):
        await storage.read("a/digits", 4, 3)


async def test_large_object_streams_in_chunks(storage: Storage) -> None:
    """No chunk is the whole object, and the order is kept."""
    data = bytes(range(256)) * 4096 * 2
    await storage.put("a/large", data, "application/octet-stream")
    pieces = [piece async for piece in storage.stream("a/large", 5)]
    assert b"".join(pieces) == data[5:]
    assert max(map(len, pieces)) <= 256 * 1024


async def test_missing_object_raises_not_found_everywhere(storage: Storage) -> None:
    await storage.put("a/b/c", b"x", "image/png")
    for key in ("a/none", "none/at/all", "a/b", "a/b/c/d"):
        with pytest.raises(NotFound):
            await storage.head(key)
        with pytest.raises(NotFound):
            await storage.read(key)
        with pytest.raises(NotFound):
            await storage.read(key, 2, 2)
        with pytest.raises(NotFound):
            [piece async for piece in storage.stream(key)]


async def test_unsafe_key_is_rejected(storage: Storage) -> None:
    """No traversal, no absolute paths, no hidden names."""
    hidden, odd = ["/etc/passwd", "../up", "a/../b", "a/./b", ".hidden"], ["", "a//b", "a/", "a\\b", "a\0b", "a b", "ü"]
    for key in (*hidden, *odd, "k" * 600):
        with pytest.raises(ValueError, match="storage key"):
            await storage.put(key, b"x", "image/png")
        with pytest.raises(ValueError, match="storage key"):
            await storage.read(key)


async def test_delete_prefix_removes_only_objects_below_it(storage: Storage) -> None:
    """A prefix is a path: `jobs/job_1` does not include `jobs/job_10`. Repeating it deletes nothing."""
    for key in ("jobs/job_1/1/0.png", "jobs/job_1/1/1.odd", "jobs/job_1/2/0.png", "jobs/job_10/1/0.png"):
        await storage.put(key, b"x", "image/png")
    assert await storage.delete_prefix("jobs/job_1/") == 3
    assert await storage.delete_prefix("jobs/job_1") == 0
    assert await storage.read("jobs/job_10/1/0.png") == b"x"
    assert await storage.delete_prefix("jobs/job_10/1/0.png") == 1
    with pytest.raises(NotFound):
        await storage.head("jobs/job_10/1/0.png")


async def test_prefix_of_all_objects_is_rejected(storage: Storage) -> None:
    for prefix in ("", "/", "jobs/..", "../jobs"):
        with pytest.raises(ValueError, match="storage key"):
            await storage.delete_prefix(prefix)


async def test_many_objects_are_deleted_page_by_page(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call deletes more objects than a listing page holds."""
    monkeypatch.setattr("shared.storage.s3.MOST_KEYS", 10)
    await asyncio.gather(*(storage.put(f"jobs/many/1/{index}.png", b"", "image/png") for index in range(35)))
    assert await storage.delete_prefix("jobs/many") == 35


async def test_reads_are_atomic_under_concurrent_writes(storage: Storage) -> None:
    """A reader never sees a partial or missing object."""
    versions = {bytes([value]) * 100_000 for value in range(6)}
    await storage.put("a/torn", next(iter(versions)), "image/png")

    async def write(data: bytes) -> None:
        await storage.put("a/torn", data, "image/png")

    async def read() -> bytes:
        return await storage.read("a/torn")

    seen = await asyncio.gather(*(job for data in versions for job in (write(data), read(), read())))
    assert {data for data in seen if data is not None} <= versions


async def test_puts_succeed_during_deletes_in_the_same_folder(storage: Storage) -> None:
    """Even if a sweep removes the directory at that moment."""
    for _ in range(20):
        await asyncio.gather(
            storage.put("jobs/race/1/0.png", b"x", "image/png"),
            storage.delete_prefix("jobs/race/1/1.png"),
            storage.delete_prefix("jobs/race/2"),
        )
        await storage.delete_prefix("jobs/race")


async def test_a_put_succeeds_where_a_parent_is_removed_while_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep removes `jobs/race` between the two directories that `mkdir` makes."""
    make = Path.mkdir
    removed = False

    def mkdir(path: Path, *args: Any, **kwargs: Any) -> None:
        nonlocal removed
        make(path, *args, **kwargs)
        if path == tmp_path / "jobs/race" and not removed:
            removed = True
            path.rmdir()

    monkeypatch.setattr(Path, "mkdir", mkdir)
    storage = connect(Settings(storage_dir=tmp_path))
    await storage.put("jobs/race/1/0.png", b"x", "image/png")
    assert removed
    assert await storage.read("jobs/race/1/0.png") == b"x"
    await storage.close()


async def test_check_leaves_no_object(storage: Storage) -> None:
    await storage.check()
    assert await storage.delete_prefix("health") == 0


@pytest.mark.every_s3
async def test_presigned_url_reads_without_credentials(s3_server: str) -> None:
    """It names the public endpoint."""
    public = s3_server.replace("127.0.0.1", "localhost")
    storage = connect(_s3(s3_server, s3_public_endpoint_url=public))
    await storage.put("jobs/job_1/1/0.png", b"image", "image/png")
    url = await storage.presigned_url("jobs/job_1/1/0.png", 60)
    longest = await storage.presigned_url("jobs/job_1/1/0.png", 1_000_000)
    await storage.close()
    assert url is not None
    assert "X-Amz-Expires=604800&" in str(longest), "the most that a server accepts"
    assert url.startswith(f"{public}/images/jobs/job_1/1/0.png?")
    async with httpx.AsyncClient(timeout=60) as client:
        response = await client.get(url)
    assert (response.content, response.headers["content-type"]) == (b"image", "image/png")


@pytest.mark.parametrize(
    ("settings", "environment", "start", "region"),
    [
        ({}, {}, "http://s3.example:9000/images/", "us-east-1"),
        ({"s3_addressing": "virtual"}, {}, "http://images.s3.example:9000/", "us-east-1"),
        ({}, {"AWS_REGION": "eu-north-1"}, "http://s3.example:9000/images/", "eu-north-1"),
        ({}, {"AWS_DEFAULT_REGION": "eu-west-3"}, "http://s3.example:9000/images/", "eu-west-3"),
        ({"s3_region": "here"}, {"AWS_REGION": "eu-north-1"}, "http://s3.example:9000/images/", "here"),
    ],
)
async def test_addressing_and_region_follow_the_settings_then_the_environment(
    settings: dict[str, Any],
    environment: dict[str, str],
    start: str,
    region: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some servers know buckets only as host names, and sign only for their region."""
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    storage = connect(_s3("http://s3.example:9000", **settings))
    url = str(await storage.presigned_url("a.png", 60))
    await storage.close()
    assert url.startswith(f"{start}a.png?")
    assert f"%2F{region}%2Fs3%2F" in url


async def test_folder_has_no_presigned_urls(tmp_path: Path) -> None:
    """The API serves a folder's objects itself."""
    storage = connect(Settings(storage_dir=tmp_path))
    assert await storage.presigned_url("jobs/job_1/1/0.png", 60) is None
    await storage.close()


async def test_folder_keeps_no_temporary_files(tmp_path: Path) -> None:
    """After puts and deletions only the folder itself is left."""
    storage = connect(Settings(storage_dir=tmp_path))
    await storage.put("a/b", b"x", "image/odd")
    await storage.put("a/c/d.png", b"x", "image/png")
    await storage.delete_prefix("a")
    await storage.close()
    assert [path for path in tmp_path.rglob("*") if path.name != ".incomplete"] == []


async def test_a_folder_that_cannot_be_listed_is_not_reported_as_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention would forget its objects; another writer's deletion in the meantime is no error."""
    storage = connect(Settings(storage_dir=tmp_path))
    await storage.put("a/b/c.png", b"x", "image/png")
    scandir, codes = os.scandir, [errno.EIO, errno.ENOENT]

    def fail(path: Any) -> Any:
        if str(path).endswith("b") and codes:
            raise OSError(codes.pop(0), "no", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", fail)
    with pytest.raises(StorageUnavailable):
        await storage.delete_prefix("a/")
    await storage.delete_prefix("a/")
    assert await storage.delete_prefix("a/") == 1
    await storage.close()


async def test_error_for_an_unwritable_folder_names_the_setting(tmp_path: Path) -> None:
    """The path is a file."""
    (tmp_path / "file").write_text("")
    storage = connect(Settings(storage_dir=tmp_path / "file"))
    with pytest.raises(StorageUnavailable, match="FUSEQUEUE_STORAGE_DIR"):
        await storage.check()
    with pytest.raises(StorageUnavailable, match="FUSEQUEUE_STORAGE_DIR"):
        await storage.put("a/b", b"x", "image/png")
    await storage.close()


@pytest.mark.parametrize("root", ["objects", "new/parents/objects"])
async def test_an_object_in_a_folder_survives_a_power_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: str
) -> None:
    """A file is durable when its content and the entry of each folder on the way to it are flushed."""
    flushed: set[Path] = set()
    fsync = os.fsync

    def record(descriptor: int) -> None:
        flushed.add(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    storage = connect(Settings(storage_dir=tmp_path / root))
    await storage.put("jobs/job_1/1/0.png", b"image", "image/png")
    folder = tmp_path / root / "jobs" / "job_1" / "1"
    assert {parent for parent in (folder, *folder.parents) if parent.is_relative_to(tmp_path)} <= flushed
    flushed.clear()
    await storage.put("jobs/job_1/2/0.png", b"image", "image/png")
    assert {folder.with_name("2"), folder.parent} <= flushed
    await storage.close()
